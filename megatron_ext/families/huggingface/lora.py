"""Adapters of low rank beside the matrices of a model's layers, which alone are trained (LoRA, Hu et al. 2021).

A linear layer y = Wx gets two matrices: y = Wx + alpha / rank * B(Ax). A begins as peft draws it, B with zeros, so that
the model begins as it was.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.families.huggingface.shares import Shares
from megatron_ext.families.huggingface.weights import save_adapters
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup, reduce

LAYERS = "layers"
"""What the names of blocks that are layers begin with."""
A, B = "lora_A", "lora_B"
"""The names of an adapter's matrices beside `weight`, as in files of peft."""
PEFT = "base_model.model."
"""What names in such files begin with."""
OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Where transformers holds experts in one tensor, peft 0.21 takes layers of these names for theirs, from when each was
a layer (`_MOE_TARGET_MODULE_MAPPING`). A weight is what it is called."""


class Adapters:
    """Which linear layers of a model have adapters, and how these begin and end."""

    def __init__(self, train: TrainConfig, layers: List[nn.Module], name: str, shares: Shares) -> None:
        """`name` is the model's, for messages; `shares` is what a tensor group shares out of it. Raises EngineError: a
        target is in no layer."""
        assert train.adapters is not None
        self._rank, self._alpha = train.adapters.lora_rank, train.adapters.lora_alpha
        self._seed = train.seed
        self._shares = shares
        self.scale = self._alpha / self._rank
        linear = [[name for name, one in layer.named_modules() if _is_linear(one)] for layer in layers]
        known = sorted({name.rpartition(".")[2] for of in linear for name in of})
        targets = known if train.lora_targets is None else train.lora_targets
        lacking = [one for one in targets if not any(_ends(name, one) for of in linear for name in of)]
        if lacking or not targets:
            given = "null" if train.lora_targets is None else f"[{','.join(targets)}]"
            raise EngineError(
                f"train.lora_targets={given}: the layers of {name} have no linear layer "
                f"{' and no '.join(lacking)}".rstrip()
                + f"; they have {', '.join(known) or 'none'}"
            )
        self.targets = [[name for name in of if any(_ends(name, one) for one in targets)] for of in linear]
        """For each layer, the names of the linear layers in it that have adapters."""
        experts = any(one.dim() == 3 for layer in layers for one in layer.parameters())
        by_weight = [one for one in targets if experts and one.rpartition(".")[2] in OF_EXPERTS]
        self._named = {"target_modules": sorted({*targets}.difference(by_weight))}
        """The same for peft."""
        if by_weight:
            self._named["target_parameters"] = sorted(f"{one}.weight" for one in by_weight)

    def attach(self, block: str, module: nn.Module, tensor: TensorGroup) -> None:
        """Freezes a block, or a rank's share of it, and gives it its adapters."""
        module.requires_grad_(False)
        for name in self.of(block):
            linear: Any = module.get_submodule(name)
            for key, one in self.initial(f"{block}.{name}", linear.weight).items():
                parameter = nn.Parameter(one.to(linear.weight.device))
                linear.register_parameter(key, parameter)
                if tensor.size > 1 and self._is_partial(block, name, key):
                    parameter.register_hook(lambda gradient: reduce(gradient, tensor))  # type: ignore[no-untyped-call]
            linear.forward = _Adapted(linear, self.scale)

    def of(self, block: str) -> List[str]:
        """The linear layers of a block that have adapters."""
        row, _, number = block.partition(".")
        return self.targets[int(number)] if row == LAYERS else []

    def shard(self, layer: int, name: str) -> Optional[Shard]:
        """How a tensor group shares out an adapter's matrix, by its name in a layer: B with its layer's rows, A with
        its columns."""
        module, _, key = name.rpartition(".")
        found = self._shares.layers[layer].get(f"{module}.weight")
        return found if found is not None and found.dim == (key == A) else None

    def _is_partial(self, block: str, name: str, key: str) -> bool:
        """Whether each rank has a part of the gradient of a matrix: of one that it has whole, where it has a share of
        the other one or of what the layer's output is for."""
        layer = int(block.partition(".")[2])
        shards = [self.shard(layer, f"{name}.{one}") for one in (key, B if key == A else A)]
        return shards[0] is None and (shards[1] is not None or self._shares.sums_gradients(name))

    def beside(self, block: str, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """The adapters of a block as they begin, with whose `tensors` they stand."""
        return {
            f"{name}.{key}": one
            for name in self.of(block)
            for key, one in self.initial(f"{block}.{name}", tensors[f"{name}.weight"]).items()
        }

    def trained_before(self, layer: int) -> bool:
        """Whether a gradient is wanted of what this layer takes."""
        return any(self.targets[:layer])

    def initial(self, name: str, weight: Tensor) -> Dict[str, Tensor]:
        """The adapter of a matrix: A as torch draws linear layers, from the seed and the name; B with zeros."""
        out, within = weight.shape
        first, second = weight.new_empty(self._rank, within, device="cpu"), weight.new_zeros(out, self._rank)
        if weight.is_meta:
            first = first.to("meta")
        else:
            source = torch.Generator().manual_seed(zlib.crc32(f"{A}.{name}".encode(), self._seed))
            nn.init.kaiming_uniform_(first, math.sqrt(5), generator=source)
        return {A: first, B: second}

    def merged(self, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """The model's weights, of those with adapters beside them."""
        found = {name: one for name, one in tensors.items() if not is_adapter(name)}
        for name, one in tensors.items():
            if name.endswith(f".{A}"):
                module = name[: -len(A)]
                found[f"{module}weight"] = found[f"{module}weight"] + self.scale * (tensors[f"{module}{B}"] @ one)
        return found

    def save(self, tensors: Mapping[str, Tensor], folder: Path, base: Optional[str]) -> None:
        """Writes the adapters alone into `folder`, as peft loads them beside the model `base`."""
        own = {f"{PEFT}{name}.weight": one for name, one in tensors.items() if is_adapter(name)}
        config = {
            **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base},
            **{"r": self._rank, "lora_alpha": self._alpha, "lora_dropout": 0.0, "bias": "none"},
            **self._named,
            **{"fan_in_fan_out": False, "inference_mode": True},
        }
        save_adapters(own, config, folder)


class _Adapted:
    """The forward pass of a linear layer with an adapter."""

    def __init__(self, module: Any, scale: float) -> None:
        self._module = module
        self._scale = scale
        self._forward = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self._module.lora_A)
        return self._forward(x) + F.linear(inner, self._module.lora_B) * self._scale


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.rpartition(".")[2] in (A, B)


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
