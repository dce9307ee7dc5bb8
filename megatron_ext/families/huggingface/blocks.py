"""The blocks of a model of transformers: what stands before its layers, each layer, and what stands behind them."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.anatomy import Anatomy, Enough, logits_of
from megatron_ext.families.huggingface.crossing import hidden_of
from megatron_ext.families.huggingface.library import POSITIONS, WAYS, Headed, placed
from megatron_ext.families.huggingface.routing import Routed, Watch
from megatron_ext.families.huggingface.shares import Shares
from megatron_ext.families.huggingface.weights import fill
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import SEQUENCE, Wire

TOKENS = 8
"""Tokens of two documents by which a layer is tried."""


def require_positions(model: nn.Module, name: str) -> None:
    """Raises EngineError for a model that does not take positions."""
    if POSITIONS not in inspect.signature(model.forward).parameters and not isinstance(model, Headed):
        raise EngineError(
            f"data.packing=true: {name} takes no positions, by which documents that share a sample are kept apart; "
            "leave data.packing out"
        )


def way_of(anatomy: Anatomy, number: int, weight: Tensor, passed: Callable[..., Any]) -> int:
    """The way in which a layer keeps documents apart: no document changes what the one behind it gives.

    `passed` is its forward pass, of hidden states, what comes over wires, and `way`; `weight` is one of its own.

    Raises:
        EngineError: in every way it does not.
    """
    half = TOKENS // 2
    source = torch.Generator().manual_seed(0)
    at = anatomy.hidden.dims.index(SEQUENCE)
    x, other = (torch.randn(_shape(anatomy.hidden.dims), generator=source).to(weight) for _ in range(2))
    other = torch.cat([other.narrow(at, 0, half), x.narrow(at, half, half)], at)
    taken: List[Tensor] = [torch.arange(half, device=weight.device).repeat(2)[None]]
    if anatomy.by_tokens:
        taken.insert(0, torch.zeros_like(taken[0]))
    for one in anatomy.crossing[number]:
        taken.append(torch.ones(_shape(one.wire.dims), dtype=one.wire.dtype or weight.dtype, device=weight.device))
    for way in range(WAYS):
        try:
            with torch.no_grad():
                found = [passed(given, *taken, way=way) for given in (x, other)]
        except Exception:  # noqa: BLE001  (as the family's own code fails with what it does not take)
            continue
        behind = [(out[0] if isinstance(out, tuple) else out).narrow(at, half, half) for out in found]
        if torch.allclose(behind[0], behind[1], 1e-4, 1e-5):
            return way
    raise EngineError(
        f"data.packing=true: in a layer of {anatomy.name} documents that share a sample would see each other; "
        "leave data.packing out"
    )


def _shape(dims: Any) -> List[int]:
    return [TOKENS if one == SEQUENCE else 1 if isinstance(one, str) else one for one in dims]


OF_EXPERTS = 3
"""Dimensions of a tensor that has the matrices of all experts."""
MOST_TRIED = 1 << 28
"""Numbers of a layer that are drawn to try it on the machine from which a run starts: 1 GiB."""


class Frame(nn.Module):
    """Modules outside the layers, under their names in the model, whose forward pass is the model's own."""

    def __init__(self, anatomy: Anatomy, shares: Shares, held: Set[str], seed: int, tensor: TensorGroup) -> None:
        super().__init__()
        device = torch.empty(0).device
        model = anatomy.copied(held, device)
        if device.type != "meta":
            fill(model, "", None, seed)
        shares.ends(model, held, tensor)
        for name, module in model.named_modules():
            if name in held and not any(name.startswith(f"{other}.") for other in held):
                _register(self, name, module)
        self._held = held
        anatomy.release(model, held)
        _keep_formats(self)
        self._outside: Tuple[Any, ...] = (anatomy, model)
        """Not registered: only what is held here has weights."""

    def _model(self, like: Tensor) -> Tuple[Anatomy, nn.Module]:
        anatomy, model = self._outside
        anatomy.zeros(model, like.dtype, like.device, self._held)
        if model.training != self.training:
            model.train(self.training)
        return anatomy, model


class Embedding(Frame):
    """What stands before the first layer."""

    def __init__(
        self, anatomy: Anatomy, shares: Shares, seed: int, routed: Sequence[Wire], tensor: TensorGroup
    ) -> None:
        """`routed` are the wires of what layers add up about their experts."""
        super().__init__(anatomy, shares, anatomy.first, seed, tensor)
        self._routed = [tuple(map(int, wire.dims)) for wire in routed]

    def forward(self, tokens: Tensor, positions: Optional[Tensor] = None) -> Union[Tensor, Tuple[Tensor, ...]]:
        """[batch, sequence] -> hidden states, and what else of it layers take; `positions` [batch, sequence] of
        documents that share a sequence."""
        anatomy, model = self._model(next(self.parameters()))
        left: List[Tensor] = []

        def handler(number: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            x = hidden_of(args, kwargs)
            if number == 0:
                left.append(x)
            left.extend(anatomy.carried_in(number, args, kwargs))
            if number + 1 == len(anatomy.layers) or not anatomy.carries:
                raise Enough
            return anatomy.given(x, number)

        with anatomy.routed(handler), contextlib.suppress(Enough):
            model(input_ids=tokens, use_cache=False, **placed(positions, 0, anatomy.config, torch.float32))
        left.extend(torch.zeros(shape, device=left[0].device) for shape in self._routed)
        return left[0] if len(left) == 1 else tuple(left)


class Head(Frame):
    """What stands behind the last layer."""

    def __init__(self, anatomy: Anatomy, shares: Shares, seed: int, tensor: TensorGroup) -> None:
        super().__init__(anatomy, shares, anatomy.last, seed, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> logits [batch, sequence, vocabulary, or a rank's share of it]."""
        anatomy, model = self._model(x)
        tokens = torch.zeros(anatomy.shape_of(x), dtype=torch.int64, device=x.device)
        with anatomy.routed(lambda number, args, kwargs: anatomy.given(x, number)):
            return logits_of(model(input_ids=tokens, use_cache=False))


class _Layer:
    """A layer's forward pass, from a wire to a wire."""

    def __init__(self, anatomy: Anatomy, number: int, layer: nn.Module, packs: bool, routed: Optional[Routed]) -> None:
        self._routed = routed
        self._watch: Optional[Watch] = None if routed is None else Watch(layer, routed.experts, routed.routers)
        self._anatomy = anatomy
        self._packs = packs
        self._way = 0
        self._number = number
        self._layer = layer
        self._forward = layer.forward

    def keep_apart(self) -> None:
        """Has documents that share a sequence not see each other. Raises EngineError: they would."""
        training = self._layer.training
        self._layer.eval()
        if self._watch is not None:
            self._watch.begin()  # it looks at each pass
        self._way = way_of(self._anatomy, self._number, next(self._layer.parameters()), self._passed)
        self._layer.train(training)

    def __call__(self, x: Tensor, *others: Tensor) -> Union[Tensor, Tuple[Tensor, ...]]:
        if self._routed is None or self._watch is None:
            return self._passed(x, *others)
        routed, taken = self._routed, list(others)
        balance = None if routed.balance is None else taken.pop()
        table = None if routed.experts is None else taken.pop()
        self._watch.begin()
        y = self._passed(x, *taken)
        given = list(y) if isinstance(y, tuple) else [y]
        if table is not None:
            table = table.clone()
            table[routed.row] = self._watch.loads(table.shape[1])
            given.append(table)
        if balance is not None and routed.balance is not None:
            given.append(balance + routed.balance.found(self._watch.logits))
        return tuple(given)

    def _passed(self, x: Tensor, *others: Tensor, way: Optional[int] = None) -> Union[Tensor, Tuple[Tensor, ...]]:
        anatomy = self._anatomy
        tokens: Optional[Tensor] = None
        positions: Optional[Tensor] = None
        if anatomy.by_tokens:
            tokens, others = others[0], others[1:]
        if self._packs:
            positions, others = others[0], others[1:]
        calls = anatomy.calls(x, tokens, self._layer.training, positions, self._way if way is None else way)
        args, kwargs = calls[self._number].arguments(x, others)
        y = self._forward(*args, **kwargs)
        if not isinstance(y, (tuple, list)):
            return y
        beside = [y[one.other.place] for one in anatomy.gives(self._number) if one.other is not None]
        return (y[0], *beside) if beside else y[0]


def layer_of(
    anatomy: Anatomy,
    shares: Shares,
    seed: int,
    packs: bool,
    number: int,
    tensor: TensorGroup,
    routed: Optional[Routed] = None,
) -> nn.Module:
    """A layer of transformers as a block, with its initial weights; `packs`: it takes positions of documents; `routed`:
    it adds up what its experts get. Raises EngineError: documents that share a sequence would see each other in it."""
    device = torch.empty(0).device
    layer = anatomy.layer(number, device)
    if device.type != "meta":
        fill(layer, f"{anatomy.path}.{number}", anatomy.owner, seed)
    _keep_formats(layer)
    layer.forward = forward = _Layer(anatomy, number, layer, packs, routed)
    if packs and device.type != "meta":
        forward.keep_apart()
    shares.layer(layer, number, tensor)
    return layer


def keeps_apart(anatomy: Anatomy, number: int, seed: int) -> bool:
    """Has a layer by itself try to keep documents apart; False: it is too large for that. Its experts, each of which
    takes a token by itself, have the same weights here, and take no more memory than one.

    Raises:
        EngineError: they would see each other.
    """
    layer = anatomy.layer(number, torch.device("cpu"))  # takes memory when it is written to
    experts = [(name, one.shape) for name, one in layer.named_parameters() if one.dim() == OF_EXPERTS]
    for name, _ in experts:
        _put(layer, name, layer.get_parameter(name)[:1])
    if sum(one.numel() for one in layer.parameters()) > MOST_TRIED:
        return False
    fill(layer, f"{anatomy.path}.{number}", anatomy.owner, seed)
    for name, shape in experts:
        _put(layer, name, layer.get_parameter(name).expand(shape))
    _Layer(anatomy, number, layer, True, None).keep_apart()
    return True


def _put(root: nn.Module, name: str, value: Tensor) -> None:
    """Takes this for a parameter."""
    module, _, key = name.rpartition(".")
    root.get_submodule(module)._parameters[key] = nn.Parameter(value.detach())


def _register(root: nn.Module, name: str, module: nn.Module) -> None:
    """Under its name in the model, which may have dots."""
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]  # type: ignore[assignment]
    root.add_module(last, module)


def _keep_formats(module: nn.Module) -> None:
    """Buffers keep the number format that transformers gives them: 16 bits are too few for the angles of positions."""
    for one in module.modules():
        if any(True for _ in one.buffers(recurse=False)):
            one.keeps_format = True  # type: ignore[assignment]
