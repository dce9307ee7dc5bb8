"""Where the parameters of a GPT are in a checkpoint of megatron.core, whose tensors may have those of all layers and of
all experts, one after another. It needs no torch until tensors are read."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.checkpoints.foreign import torch_dist
from megatron_ext.checkpoints.foreign.megatron_optimizer import KEPT_AS, STATE, Training, reached_in
from megatron_ext.checkpoints.header import part_names
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.counts import checkpoint_parameter
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.families.gpt.options import GptOptions

if TYPE_CHECKING:
    from torch import Tensor

_LAYERS = "decoder.layers."
_OUTSIDE = {
    ("embedding", "word"): "embedding.word_embeddings.weight",
    ("embedding", "position"): "embedding.position_embeddings.weight",
    ("head", "word"): "output_layer.weight",
    ("head", "norm.weight"): "decoder.final_layernorm.weight",
    ("head", "norm.bias"): "decoder.final_layernorm.bias",
}
_INSIDE = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "query_norm": ("self_attention.q_layernorm.",),
    "key_norm": ("self_attention.k_layernorm.",),
    "qkv": ("self_attention.linear_qkv.",),
    "attention_out": ("self_attention.linear_proj.",),
    "mlp_in": ("mlp.linear_fc1.",),
    "mlp_out": ("mlp.linear_fc2.",),
    "router": ("mlp.router.",),
}
"""The parameters of a layer. Norms are called as parts of Transformer Engine's layer that follows, or by themselves;
those before experts by either name."""
_EXPERTS = "mlp.experts.experts."
_STATES = ("self_attention.core_attention", "self_attention.linear_qkv", "self_attention.linear_proj")
"""Layers that ask for a state of FP8, where there may be none."""
_KEEPING = {
    r"[qk]_layernorm\.weight$": "qk_layernorm=true",
    r"norm[._]bias$": "normalization=LayerNorm",
    r"linear_qkv\.bias$": "add_qkv_bias=true",
    r"linear_\w+\.bias$": "add_bias_linear=true",
    r"^output_layer\.weight$": "untie_embeddings_and_output_weights=true",
    r"position_embeddings\.weight$": "position_embedding_type=learned_absolute",
}
"""The keys of a model that give it these tensors."""
_CHAINED = re.compile(r"^chained_\d+\.")
"""How names begin where there are several optimizers, before megatron.core 0.14."""


class Place(NamedTuple):
    """A tensor there, and the first indices of the parameter in it."""

    name: str
    at: Tuple[int, ...] = ()


def places(part: str, parameter: str) -> List[Place]:
    """All places where a parameter may be, the usual one first; raises EngineError where there is none."""
    if not part.startswith("layer-"):
        return [Place(_OUTSIDE[part, parameter])]
    layer = int(part[len("layer-") :])
    expert = re.fullmatch(r"experts\.(\d+)\.(.+)", parameter)
    stem, kind = (parameter if expert is None else expert[2]).rsplit(".", 1)
    if stem not in _INSIDE:
        raise EngineError(f"a model with {stem}.{kind} is none of Megatron-Core's, whose format has no place for it")
    if expert is None:
        return [
            place
            for name in _INSIDE[stem]
            for place in (Place(f"{_LAYERS}{name}{kind}", (layer,)), Place(f"{_LAYERS}{layer}.{name}{kind}"))
        ]
    number, name = int(expert[1]), f"{_INSIDE[stem][0][len('mlp.') :]}{kind}"
    return [
        Place(f"{_LAYERS}{_EXPERTS}{name}", (layer, number)),
        Place(f"{_LAYERS}{layer}.{_EXPERTS}{name}", (number,)),
        Place(f"{_LAYERS}{layer}.{_EXPERTS}{number}.{name}"),
    ]


class Weights:
    """A GPT's weights in a folder of megatron.core's, and what else a training continues from."""

    def __init__(self, folder: Path, model: ModelConfig, training: bool = False) -> None:
        """Looks for all parameters in the folder's index; with `training` also for the optimizer's state of each, and
        takes weights of 16 bits in the optimizer's fp32.

        Raises:
            EngineError: one is not there, or has another shape than this model's; or there is a state of an optimizer
                in a form that is not read.
        """
        self._folder, self.model = folder, model
        self._index = {_CHAINED.sub("", name): stored for name, stored in torch_dist.read_index(folder).items()}
        self.reached = reached_in(folder) if training else None
        """How far the training has come; None without an optimizer's state."""
        self.kinds: Mapping[str, Sequence[str]] = (
            {WEIGHTS: ("",)} if self.reached is None else KEPT_AS[self.reached.optimizer]
        )
        """For each kind of tensors how their names may begin."""
        self._found = {
            (kind, part, name): self._find(prefixes, part, name, parameter)
            for kind, prefixes in {**self.kinds, "": ("",)}.items()
            for part, name, parameter in _parameters(model)
        }
        deeper = [name for name, stored in self._index.items() if _layers(name, stored) > model.layers]
        if deeper:
            raise EngineError(
                f"{folder}: {deeper[0]} has {_layers(deeper[0], self._index[deeper[0]])} layers, the model has "
                f"{model.layers}; give the run the same model"
            )
        self._require_all()

    def part(self, part: str, kind: str = WEIGHTS) -> Dict[str, Tensor]:
        """What there is of a kind for the parameters of a part of a checkpoint of ours, in fp32. Raises EngineError: a
        file is damaged."""
        from megatron_ext.core.parameters import by_kind, qkv_heads

        model = self.model
        content: Dict[str, Tensor] = {}
        for (of, own, name), found in self._found.items():
            if (of, own) != (kind, part):
                continue
            tensor = self._read(found)
            if kind == WEIGHTS and found[0].name.startswith(STATE):
                self._require_equal(part, name, tensor, self._read(self._found["", part, name]))
            rows = checkpoint_parameter(model, part, name).rows
            if name.startswith("qkv."):
                tensor = by_kind(tensor, model.query_groups, qkv_heads(model))
            content[name] = tensor[:rows]
        return content

    def _require_all(self) -> None:
        """Raises EngineError if a tensor of the folder's model is none of this one's, which would compute another."""
        named = {place.name for part, name, _ in _parameters(self.model) for place in places(part, name)}
        there = {
            re.sub("_[wv]$", "", name)  # halves of a gated layer
            for name in self._index
            if name.startswith(("decoder.", "embedding.", "output_layer.")) and "._extra_state" not in name
        }
        others = {
            name: next((key for pattern, key in _KEEPING.items() if re.search(pattern, name)), None)
            for name in sorted(there - named)
        }
        if not others:
            return
        keys = set(others.values())
        if "add_bias_linear=true" in keys:  # which gives queries, keys and values theirs, too
            keys.discard("add_qkv_bias=true")
        unknown = [name for name, key in others.items() if key is None]
        first = unknown or list(others)
        told = f"{', '.join(first[:3])}{f' and {len(first) - 3} more' if len(first) > 3 else ''}"
        way_out = "of which tdpp has none" if unknown else f"use {' '.join(sorted(f'model.{key}' for key in keys))}"
        raise EngineError(f"{self._folder}: its model has {told}, which this model lacks; {way_out}")

    def _read(self, found: Sequence[Place]) -> Tensor:
        import torch

        return torch.cat([torch_dist.read(place.name, self._index[place.name], place.at) for place in found])

    def _require_equal(self, part: str, name: str, main: Tensor, own: Tensor) -> None:
        """Raises EngineError if the optimizer's weights are not the model's, but for what 8 bits round."""
        if not (main - own).abs().max() <= own.abs().max() / 8:
            raise EngineError(
                f"{self._folder}: the optimizer's weights of {part} {name} are not the model's, so its state is wrong; "
                "Megatron-Core saves it so with --dist-ckpt-optim-fully-reshardable if a rank's numbers of a tied "
                f"embedding are no multiple of 128; train.load={self._folder} takes the model's weights alone"
            )

    def _find(self, prefixes: Sequence[str], part: str, name: str, parameter: Parameter) -> List[Place]:
        """Its place, or those of the halves of a gated layer, which may be tensors of their own."""
        usual = places(part, name)
        candidates = [one._replace(name=f"{prefix}{one.name}") for prefix in prefixes for one in usual]
        halves = [[Place(f"{one.name}{half}", one.at) for half in ("_w", "_v")] for one in candidates]
        for found in [*([one] for one in candidates), *halves]:
            if all(place.name in self._index for place in found):
                break
        else:
            raise EngineError(
                f"{self._folder}: expected a tensor {prefixes[-1]}{usual[0].name}, found {len(self._index)} others"
            )
        shapes = [self._index[place.name].shape for place in found]
        rest = [shape[len(place.at) :] for place, shape in zip(found, shapes)]
        there = (sum(shape[0] for shape in rest), *rest[0][1:]) if all(rest) else ()
        wanted = parameter.shape if parameter.rows is None else (parameter.rows, *parameter.shape[1:])
        rows = there[0] >= wanted[0] if there and parameter.rows is not None else there[:1] == wanted[:1]
        inside = all(number < size for place, shape in zip(found, shapes) for number, size in zip(place.at, shape))
        if not (inside and rows and there[1:] == tuple(wanted[1:])):
            raise EngineError(
                f"{self._folder}: {found[0].name} has the shape {list(shapes[0])}, which is not that of {part} "
                f"{name}, {list(wanted)}; give the run the same model"
            )
        return found


def _layers(name: str, stored: torch_dist.Stored) -> int:
    """How many layers there are at least, by a tensor."""
    if not name.startswith(_LAYERS):
        return 0
    number = name[len(_LAYERS) :].split(".")[0]
    return int(number) + 1 if number.isdigit() else stored.shape[0] if stored.shape else 0


def _parameters(model: ModelConfig) -> Iterator[Tuple[str, str, Parameter]]:
    """All parts, parameters, and what these are, less copies of tied ones."""
    tied = model.traits.tied(model)
    for part in part_names(model.layers):
        kind = "layer" if part.startswith("layer-") else part
        for name in model.traits.parameters(model, kind):
            if f"{kind}.{name}" not in tied:
                yield part, name, checkpoint_parameter(model, part, name)


def save(
    folder: Path,
    model: ModelConfig,
    content: Callable[[str, str], Dict[str, Tensor]],
    kind: str = WEIGHTS,
    training: Optional[Training] = None,
) -> None:
    """Writes what megatron.core's GPTModel and Megatron-LM load, in any layout of theirs: a release with the weights of
    this kind, or with `training` a checkpoint that they continue from. `content` gives the tensors of a part and a
    kind, in fp32.

    Raises:
        EngineError: a part is damaged.
        OSError: it cannot be written.
    """
    from megatron_ext.core.parameters import by_group, qkv_heads

    held: Dict[Tuple[str, str], Dict[str, Tensor]] = {}

    def tensor(part: str, name: str, kind: str) -> Tensor:
        if (part, kind) not in held:
            held.clear()
            held[part, kind] = content(part, kind)
        found = held[part, kind][name]
        return by_group(found, model.query_groups, qkv_heads(model)) if name.startswith("qkv.") else found

    experts = model.own(GptOptions).experts
    kinds = [(kind, ""), *(training.kinds if training else ())]
    chunks = []
    for (part, name, parameter), (of, prefix) in product(_parameters(model), kinds):
        shape = parameter.shape if parameter.rows is None else (parameter.rows, *parameter.shape[1:])
        usual = places(part, name)
        # without Transformer Engine, megatron.core calls the norm before experts as if it were part of a layer
        for place in usual[::2] if experts is not None and name.startswith("mlp_norm.") else usual[:1]:
            whole = ((), (model.layers,), (model.layers, experts or 0))[len(place.at)]
            zeros = (0,) * len(shape)
            chunks.append(
                torch_dist.Written(
                    f"{prefix}{place.name}",
                    (*whole, *shape),
                    (*place.at, *zeros),
                    (*(1 for _ in place.at), *shape),
                    lambda part=part, name=name, of=of: tensor(part, name, of),  # type: ignore[misc]
                )
            )
    said, common = torch_dist.RELEASE, {"checkpoint_version": 3.0, "iteration": 0}
    if training is not None:
        said, common = str(training.iteration), training.common
    (folder / torch_dist.TRACKER).write_text(said, encoding="utf-8")
    inner = torch_dist.folder_of(folder)
    inner.mkdir()
    torch_dist.write(inner, chunks, list(_states(model.layers, experts)), common)


def _states(layers: int, experts: Optional[int]) -> Iterator[str]:
    """The names under which its layers ask for a state, which is none."""
    own = _STATES if experts is not None else (*_STATES, "mlp.linear_fc1", "mlp.linear_fc2")
    for layer in range(layers):
        yield from (f"{_LAYERS}{name}._extra_state/shard_{layer}_{layers}" for name in own)
        for expert in range(experts or 0):
            for name in ("linear_fc1", "linear_fc2"):
                yield f"{_LAYERS}{_EXPERTS}{name}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
