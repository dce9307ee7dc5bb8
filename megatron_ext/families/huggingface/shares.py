"""How a tensor group shares out the layers of transformers: by the family's own plan, `base_model_tp_plan`.

A plan names modules and parameters, and how each is shared out. Modules keep their own forward pass, with a share of
their weights; what goes into and out of them is summed, gathered or split around it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.anatomy import LENGTH, Anatomy
from megatron_ext.families.huggingface.crossing import BATCH, Meaningless, Pretended
from megatron_ext.families.huggingface.library import Headed
from megatron_ext.families.huggingface.weights import base_of
from megatron_ext.parallel.tensor_parallel import Shard, TensorGroup, reduce, vocab_embedding
from megatron_ext.tasks.task import SEQUENCE

COLUMNS, COLUMNS_GATHERED = "colwise", "colwise_gather_output"
ROWS, ROWS_SPLIT = "rowwise", "rowwise_split_input"
PACKED_COLUMNS, PACKED_ROWS = "packed_colwise", "packed_rowwise"
PARTIAL_GRADIENT, EXPERTS, LATENT = "replicated_with_grad_allreduce", "moe_tp_experts", "mla_kv_a_proj"
NO_EXPERT, SUMMED, WHOLE, LOCAL = "moe_identity_expert", "all_reduce", "replicate", "local_params"
KNOWN = (
    *(COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT, PACKED_COLUMNS, PACKED_ROWS, PARTIAL_GRADIENT, EXPERTS, LATENT),
    *(NO_EXPERT, SUMMED, WHOLE, LOCAL),
)
HEADS = ("num_attention_heads", "num_key_value_heads")


class Shares:
    """What a tensor group shares out of a model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        plan = getattr(anatomy.config, "base_model_tp_plan", None) or {}
        row = anatomy.path.rpartition(".")[2] + ".*."
        self.styles = {key[len(row) :]: style for key, style in plan.items() if key.startswith(row)}
        self.vocabulary = bool(self.styles) and _shares_vocabulary(anatomy.model)
        """Whether the rows of the embedding and of the head are shared out, too."""
        self.rows = _rows_by_name(anatomy.model) if self.vocabulary else {}
        """How many rows each parameter of these has, by its name in the model."""
        self.layers = [dict(self._shards(layer)) for layer in anatomy.layers]
        """For each layer, the shards of its parameters by their names in it."""

    def require(self, size: int) -> None:
        """Whether a group of this size can share it out. Raises EngineError: it cannot."""
        told = f"parallel.tensor={size} is not possible with {self._anatomy.name}"
        way_out = "use parallel.tensor=1, and more stages or parallel.sharded_optimizer where memory is short"
        if not self.styles:
            raise EngineError(f"{told}: transformers has no tensor plan for it (base_model_tp_plan); {way_out}")
        for key, style in self.styles.items():
            if style not in KNOWN:
                raise EngineError(
                    f"{told}: its tensor plan shares {key} out as {style}, which tdpp does not; {way_out}"
                )
        for key in HEADS:
            count = _number(self._anatomy.config, key)
            if COLUMNS in self.styles.values() and count is not None and count % size:
                raise EngineError(
                    f"{told}: {key}={count} is not a multiple of {size}; use a tensor size that divides it"
                )
        for number, shards in enumerate(self.layers):
            for name, shard in shards.items():
                length = self._anatomy.layers[number].get_parameter(name).shape[shard.dim]
                if length % (size * sum(shard.pieces)):
                    raise EngineError(
                        f"{told}: dimension {shard.dim} of layers.{number}.{name} has {length} numbers, which is not a "
                        f"multiple of {size * sum(shard.pieces)}; use a tensor size that divides it"
                    )
        for number in {self._anatomy.kinds.index(kind) for kind in self._anatomy.kinds}:
            try:
                self._try(number, size)
            except Exception as error:
                raise EngineError(
                    f"{told}: its layers do not compute with a share of their weights: {error}; {way_out}"
                ) from error

    def layer(self, layer: nn.Module, number: int, tensor: TensorGroup) -> None:
        """Leaves a rank's share of a layer."""
        if tensor.size == 1:
            return
        for name, shard in self.layers[number].items():
            parameter = layer.get_parameter(name)
            parameter.data = shard.part(parameter.data, tensor.size, tensor.rank)
        for name, module in layer.named_modules():
            self._route(module, self._style(name), tensor)

    def ends(self, model: nn.Module, held: Any, tensor: TensorGroup) -> None:
        """The same of the embedding and the head of a whole model, of which the modules `held` have weights."""
        if tensor.size == 1 or not self.vocabulary:
            return
        embedding, head = _ends(model)
        names = {id(module): name for name, module in model.named_modules()}
        shared = set()
        for module in (embedding, head):
            for one in module.parameters(recurse=False) if names[id(module)] in held else ():
                if id(one) not in shared:
                    one.data = _rows(one.data, tensor)
                    shared.add(id(one))
        if names[id(embedding)] in held:
            _look_up(embedding, tensor)
        if names[id(head)] in held:
            head.register_forward_pre_hook(lambda module, args: (tensor.enter(args[0]),))

    def sums_gradients(self, name: str) -> bool:
        """Whether each rank computes a part of the gradients of this module in a layer, which it has whole."""
        return self._style(name) == PARTIAL_GRADIENT

    def _style(self, name: str) -> Optional[str]:
        return self.styles.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))

    def _shards(self, layer: nn.Module) -> Iterator[Tuple[str, Shard]]:
        for name, parameter in layer.named_parameters():
            style = self._style(name) or self._style(name.rpartition(".")[0])
            if style in (COLUMNS, COLUMNS_GATHERED, PACKED_COLUMNS):
                pieces = (1, 1) if style == PACKED_COLUMNS else (1,)
                yield name, Shard(max(0, parameter.dim() - 2), pieces)
            elif style in (ROWS, ROWS_SPLIT, PACKED_ROWS) and parameter.dim() > 1:
                yield name, Shard(parameter.dim() - 1, (1, 1) if style == PACKED_ROWS else (1,))

    def _route(self, module: nn.Module, style: Optional[str], tensor: TensorGroup) -> None:
        """Has a module take and give what its style says."""
        if style in (COLUMNS, COLUMNS_GATHERED, PACKED_COLUMNS, EXPERTS):
            module.register_forward_pre_hook(lambda _, *given: _mapped(tensor.enter, given), with_kwargs=True)
        if style == COLUMNS_GATHERED:
            module.register_forward_hook(lambda _, args, out: tensor.gather(out))
        if style == ROWS_SPLIT:
            module.register_forward_pre_hook(lambda _, args: (tensor.split(args[0]), *args[1:]))
        if style in (ROWS, ROWS_SPLIT, PACKED_ROWS) and isinstance(getattr(module, "bias", None), nn.Parameter):
            module.forward = partial(_without_bias, module)
            module.register_forward_hook(partial(_summed, tensor))
        elif style in (ROWS, ROWS_SPLIT, PACKED_ROWS, EXPERTS, SUMMED):
            module.register_forward_hook(lambda _, args, out: tensor.leave(out))
        if style == NO_EXPERT:
            module.register_forward_pre_hook(lambda _, args: (args[0] / tensor.size, *args[1:]))
        if style == LATENT:
            rotary = self._anatomy.config.qk_rope_head_dim
            module.register_forward_hook(lambda _, args, out: _last_entered(out, rotary, tensor))
        if style == PARTIAL_GRADIENT:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: reduce(gradient, tensor))  # type: ignore[no-untyped-call]

    def _try(self, number: int, size: int) -> None:
        """Has a rank's share of a layer compute on the device meta."""
        anatomy = self._anatomy
        layer = anatomy.layer(number, torch.device("meta"))
        self.layer(layer, number, Pretended(size))
        sizes = {BATCH: 1, SEQUENCE: min(LENGTH, anatomy.sequence_length)}
        x = _like(anatomy.hidden.dims, sizes, "cpu")
        call = anatomy.calls(x, anatomy.some_tokens(x), True)[number]
        crossing = [_like(one.wire.dims, sizes, "meta") for one in anatomy.crossing[number]]
        args, kwargs = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), call.arguments(x, crossing))
        with torch.no_grad(), Meaningless():  # type: ignore[no-untyped-call]
            out = layer(*args, **kwargs)
        found = out[0] if isinstance(out, (tuple, list)) else out
        if found.shape != x.shape:
            raise ValueError(f"{list(found.shape)} instead of {list(x.shape)}")


def _without_bias(module: Any, x: Tensor) -> Tensor:
    """What is summed over ranks; the bias is added once, to the sum."""
    return F.linear(x, module.weight)


def _summed(tensor: TensorGroup, module: Any, args: Any, out: Tensor) -> Tensor:
    return tensor.leave(out) + module.bias


def _number(config: Any, key: str) -> Optional[int]:
    try:
        found = getattr(config, key, None)
    except Exception:  # noqa: BLE001  (transformers' own class of errors, where layers differ in it)
        return None
    return found if isinstance(found, int) else None


def _mapped(change: Any, given: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: change(one) if one.is_floating_point() else one, given)


def _last_entered(out: Tensor, width: int, tensor: TensorGroup) -> Tensor:
    """The rotary part of what all heads have in common goes into the heads of this rank alone."""
    return torch.cat([out[..., : out.shape[-1] - width], tensor.enter(out[..., out.shape[-1] - width :])], -1)


def _like(dims: Any, sizes: Dict[str, int], device: str) -> Tensor:
    return torch.empty([sizes[one] if isinstance(one, str) else one for one in dims], device=device)


def _ends(model: Any) -> Tuple[Any, Any]:
    """The embedding and the head."""
    root, _ = base_of(model)
    head = model.lm_head if isinstance(model, Headed) else root.get_output_embeddings()
    return root.get_input_embeddings(), head


def _shares_vocabulary(model: Any) -> bool:
    """Whether its plan shares out the head's columns, and both ends are matrices with a row for each token."""
    embedding, head = _ends(model)
    plan = (
        {"lm_head": COLUMNS_GATHERED} if isinstance(model, Headed) else (getattr(type(model), "_tp_plan", None) or {})
    )
    names = {id(module): name for name, module in model.named_modules()}
    return (
        isinstance(embedding, nn.Embedding)
        and isinstance(head, nn.Linear)
        and plan.get(names.get(id(head), "")) == COLUMNS_GATHERED
        and embedding.weight.shape == head.weight.shape
        and embedding.max_norm is None
    )


def _rows_by_name(model: nn.Module) -> Dict[str, int]:
    ends = {id(one) for module in _ends(model) for one in module.parameters(recurse=False)}
    return {name: len(one) for name, one in model.named_parameters(remove_duplicate=False) if id(one) in ends}


def _rows(whole: Tensor, tensor: TensorGroup) -> Tensor:
    """A rank's share of the rows, filled up with zeros to the same number on every rank."""
    share = -(-len(whole) // tensor.size)
    padded = torch.cat([whole, whole.new_zeros(share * tensor.size - len(whole), *whole.shape[1:])])
    return padded[tensor.rank * share : (tensor.rank + 1) * share].clone()


def _look_up(embedding: nn.Embedding, tensor: TensorGroup) -> None:
    """Has an embedding, whatever it does to the rows that it finds, look for those of this rank."""
    share = len(embedding.weight)
    if embedding.padding_idx is not None:
        own = embedding.padding_idx - tensor.rank * share
        embedding.padding_idx = own if 0 <= own < share else None
    usual = embedding.forward

    def forward(tokens: Tensor) -> Tensor:
        return vocab_embedding(tokens, embedding.weight, tensor, lambda own, _: usual(own))

    embedding.forward = forward  # type: ignore[method-assign, assignment]
