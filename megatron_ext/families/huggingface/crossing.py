"""What crosses a cut between layers of transformers beside hidden states, and the sizes of it all."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.library import transformers
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import SEQUENCE, Wire

HIDDEN = "hidden_states"
"""The keyword by which a layer may take what the one before it gives."""
BATCH = "batch"
Arguments = Tuple[Tuple[Any, ...], Dict[str, Any]]
"""Arguments by place and by name."""
HELD, CROSSING = object(), object()
"""Stand for hidden states, and for tensors that come over another wire."""


class Other(NamedTuple):
    """Stands for what a layer returns beside hidden states."""

    layer: int
    place: int
    """In what it returns."""


class Call(NamedTuple):
    """What a layer is given beside its hidden states."""

    flat: List[Any]
    """Tensors and other values; `HELD` in the place of the hidden states, `CROSSING` for what comes over a wire."""
    spec: Any
    """How `flat` becomes (arguments, keywords)."""

    def arguments(self, x: Tensor, crossing: Sequence[Tensor]) -> Arguments:
        """With these hidden states, and these tensors from wires in their order."""
        rest = iter(crossing)
        flat = [x if one is HELD else next(rest) if one is CROSSING else _fresh(one) for one in self.flat]
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return args, kwargs

    def on(self, device: torch.device, there: Dict[Any, Tensor]) -> Call:
        """Return the same with all its tensors on a device; `there` are those that already are, so that several layers
        share what they did before."""

        def moved(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return there.setdefault((one.data_ptr(), one.shape, one.stride(), one.dtype), one.to(device))

        return Call([moved(one) for one in self.flat], self.spec)


def _fresh(value: Any) -> Any:
    """Some families give their layers keys and values to add to in training, too, though no later layer reads them."""
    return copy.deepcopy(value) if isinstance(value, transformers().Cache) else value


class Crossing(NamedTuple):
    """A tensor that a layer takes over a wire of its own."""

    at: int
    """Its place in what the layer is given."""
    other: Optional[Other]
    """Where it is in what the layer before it returns; None: it is made before the first layer, and depends on weights
    there."""
    wire: Wire


def flat_of(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[List[Any], Any]:
    """Like pytree's, where what stands for a value is one."""
    return pytree.tree_flatten((args, kwargs), is_leaf=lambda one: isinstance(one, Other))


def hidden_of(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tensor:
    """What a layer takes from the one before it."""
    return args[0] if args else kwargs[HIDDEN]


def wire_of(name: str, tensor: Tensor, tokens: Sequence[int]) -> Wire:
    """Describe the wire of a tensor that belongs to tokens of the shape [batch, sequence]. Raises EngineError: it has
    no such dimensions."""
    shape = tuple(tensor.shape)
    at = next((at for at in range(len(shape)) if shape[at : at + 2] == tuple(tokens)), None)
    if at is None:
        raise EngineError(
            f"a tensor of shape {list(shape)} would cross the cut, which has no dimensions [batch, sequence]"
        )
    numbers = tensor.is_floating_point()
    dims: Tuple[Union[int, str], ...] = (*shape[:at], BATCH, SEQUENCE, *shape[at + 2 :])
    return Wire(name, dims, None if numbers else tensor.dtype, numbers)


def crossings(
    layers: Sequence[nn.Module],
    probed: Sequence[Arguments],
    tokens: Sequence[int],
    whole: Callable[[], Sequence[Arguments]],
    most: Sequence[int],
) -> List[List[Crossing]]:
    """What each layer takes over wires of its own, where layers are given `probed` with tokens of this shape, and
    `whole` with as many as a sequence has, of the shape `most`.

    Raises:
        EngineError: something that cannot cross is among it.
    """
    needed = [_needed(number, *given) for number, given in enumerate(probed)]
    wanted = [one for of in needed for one in of.values() if isinstance(one, Other)]
    others = _returned(layers, whole(), wanted) if wanted else {}
    found: List[List[Crossing]] = []
    for number, of in enumerate(needed):
        found.append([])
        for at, one in of.items():
            if isinstance(one, Tensor):
                found[-1].append(Crossing(at, None, wire_of(f"carried.{number}.{at}", one, tokens)))
            elif isinstance(others[one], Tensor):
                found[-1].append(Crossing(at, one, wire_of(f"of.{one.layer}.{one.place}", others[one], most)))
            elif others[one] is not None:
                raise EngineError(f"a layer takes a {type(others[one]).__name__} from the one before it")
    return found


def _needed(number: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[int, Union[Tensor, Other]]:
    """Map each place to what a layer is given there that may need a wire."""
    x = hidden_of(args, kwargs)
    found: Dict[int, Union[Tensor, Other]] = {}
    for at, one in enumerate(flat_of(args, kwargs)[0]):
        if isinstance(one, Other) and one.layer != number - 1:
            raise EngineError(f"layer {number} takes more from layer {one.layer} than hidden states")
        if isinstance(one, Other) or (isinstance(one, Tensor) and one is not x and one.requires_grad):
            found[at] = one
    return found


def _returned(layers: Sequence[nn.Module], passed: Sequence[Arguments], wanted: Sequence[Other]) -> Dict[Other, Any]:
    """On the device meta, what these layers return beside hidden states, where they are given this."""
    found: Dict[Other, Any] = {}
    for number in range(max(one.layer for one in wanted) + 1):
        flat, spec = flat_of(*passed[number])
        flat = [found.get(one) if isinstance(one, Other) else _meta(one) for one in flat]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        layer = layers[number]
        try:
            with torch.no_grad(), Meaningless():  # type: ignore[no-untyped-call]
                out = type(layer).forward(layer, *args, **kwargs)
        except Exception as error:
            raise EngineError(
                f"a layer takes more from the one before it than hidden states, whose shape is not known: {error}"
            ) from error
        found.update({one: out[one.place] for one in wanted if one.layer == number})
    return found


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


class Meaningless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where tensors have no content, there are no numbers but 0 in them: no expert has a token."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        if func is torch.ops.aten.index.Tensor and any(one is not None and one.dtype == torch.bool for one in args[1]):
            indices = [one.new_empty(0, dtype=torch.int64) if one is not None else None for one in args[1]]
            return func(args[0], indices)
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


class Pretended(TensorGroup):
    """A tensor group of ranks that are not there, for tensors without content."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)

    def split(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, -1)[0]
