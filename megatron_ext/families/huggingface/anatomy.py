"""How a model of transformers passes its layers: what its own forward pass gives to each of them.

The forward pass is run with layers that only hand on what they take, and with zeros that take no memory in the place of
all other weights. So positions, masks and whatever else a family works out before a layer are worked out by the
family's own code, where a layer needs them, and only what depends on weights crosses a cut.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager, nullcontext
from typing import AbstractSet, Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.crossing import (
    BATCH,
    CROSSING,
    HELD,
    Arguments,
    Call,
    Crossing,
    Other,
    crossings,
    flat_of,
    hidden_of,
    wire_of,
)
from megatron_ext.families.huggingface.library import Headed, layers_of, placed, transformers
from megatron_ext.families.huggingface.weights import fill
from megatron_ext.tasks.task import kinds_of

MOST_WEIGHTS = 2**22
"""Weights of a matrix that a product with zeros may touch, at most."""
LENGTH = 8
"""Tokens of the sequence by which a model is looked at, where it need not be longer."""
RESULTS = (0, 2, 3, 4, 1)
"""How many a layer may return, tried in this order; 0: its hidden states alone, in no tuple."""

Handler = Callable[[int, Tuple[Any, ...], Dict[str, Any]], Any]


class Enough(Exception):
    """A forward pass need not go on."""


class Anatomy:
    """A model on the device meta, whose layers do what they are told by `routed`."""

    def __init__(self, model: nn.Module, sequence_length: int, vocab_size: int) -> None:
        """Raises EngineError: the model cannot be cut."""
        self.model = model
        self.name = type(model.model if isinstance(model, Headed) else model).__name__
        self.path, row = layers_of(model)
        self.layers = list(row)
        self.owner = owner_of(model, self.path)
        self.config: Any = self.owner.config
        if any(getattr(one, "is_kv_shared_layer", False) for layer in self.layers for one in layer.modules()):
            raise EngineError(f"{self.name} cannot be cut: later layers attend to keys and values of earlier ones")
        self.kinds = _kinds(self.layers)
        self._told = threading.local()
        self._vocab_size, self.sequence_length = vocab_size, sequence_length
        for number, layer in enumerate(self.layers):
            layer.forward = _Routed(self._told, number)
        self.inside = {id(one) for layer in self.layers for one in layer.modules()}
        self.shared = {id(one): one for layer in self.layers for one in (layer, *layer.parameters(), *layer.buffers())}
        self._skeletons: Dict[Tuple[torch.device, torch.dtype], nn.Module] = {}
        self._known: Dict[Any, List[Call]] = {}
        self._results = 0
        self.first: Set[str] = set()
        self.last: Set[str] = set()
        self._look(sequence_length)

    @contextmanager
    def routed(self, handler: Handler) -> Iterator[None]:
        """Layers are `handler` while the block lasts, in this thread."""
        before = getattr(self._told, "handler", None)
        self._told.handler = handler
        try:
            yield
        finally:
            self._told.handler = before

    def given(self, x: Tensor, number: int) -> Any:
        """What a layer must return, as the forward pass takes it."""
        return (x, *(Other(number, place) for place in range(1, self._results))) if self._results else x

    def calls(
        self, like: Tensor, tokens: Optional[Tensor], training: bool, positions: Optional[Tensor] = None, way: int = 0
    ) -> List[Call]:
        """What each layer is given, for hidden states like these [batch, sequence, …].

        Remembered, unless it depends on the tokens. With the `positions` [batch, sequence] of documents that share a
        sequence, given in this `way`, that of the last micro-batch is.
        """
        if positions is not None:
            return self._of_documents(like, tokens, training, positions, way)
        shape = self.shape_of(like)
        key = (shape, like.device, like.dtype, training)
        if tokens is None and key in self._known:
            return self._known[key]
        if like.is_meta or (like.is_cuda and tokens is None):
            # Families ask for the content of positions, for which a host waits for a GPU, and the device meta has none.
            there: Dict[Any, Tensor] = {}
            on_host = torch.zeros(1, dtype=like.dtype).expand(like.shape)
            given = None if tokens is None else torch.zeros(shape, dtype=torch.int64)
            with _disable_current_modes() if like.is_meta else nullcontext():  # which would count what is on the host
                calls = self.calls(on_host, given, training)
            found = [call.on(like.device, there) for call in calls]
            return found if tokens is not None else self._known.setdefault(key, found)
        given = torch.zeros(shape, dtype=torch.int64, device=like.device) if tokens is None else tokens
        with torch.no_grad():
            found = self._called(self._passed(given, like.dtype, training))
        return found if tokens is not None else self._known.setdefault(key, found)

    def _of_documents(
        self, like: Tensor, tokens: Optional[Tensor], training: bool, positions: Tensor, way: int
    ) -> List[Call]:
        latest = getattr(self._told, "latest", None)
        key = (like.device, like.dtype, training, way)
        if latest is None or latest[0] is not positions or latest[1] != key:
            given = torch.zeros_like(positions) if tokens is None else tokens
            with torch.no_grad():
                latest = positions, key, self._called(self._passed(given, like.dtype, training, positions, way))
            self._told.latest = latest
        return latest[2]

    @property
    def carries(self) -> bool:
        """Whether anything but hidden states is made before the first layer."""
        return any(one.other is None for of in self.crossing for one in of)

    def carried_in(self, number: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[Tensor]:
        """What is made for a layer before the first one, of what it is given."""
        flat, _ = flat_of(args, kwargs)
        return [flat[one.at] for one in self.crossing[number] if one.other is None]

    def some_tokens(self, hidden: Tensor) -> Optional[Tensor]:
        """Tokens for hidden states of this shape, if layers are given what depends on them."""
        return torch.zeros(self.shape_of(hidden), dtype=torch.int64) if self.by_tokens else None

    def gives(self, number: int) -> List[Crossing]:
        """What the next layer takes of what a layer returns beside hidden states."""
        after = self.crossing[number + 1] if number + 1 < len(self.layers) else []
        return [one for one in after if one.other is not None]

    def shape_of(self, hidden: Tensor) -> Tuple[int, ...]:
        """Return the shape of the tokens whose hidden states these are: (batch, sequence)."""
        at = self.hidden.dims.index(BATCH)
        return tuple(hidden.shape[at : at + 2])

    def copied(self, held: Set[str], device: torch.device) -> nn.Module:
        """A copy of the model, which shares its layers, and whose modules of these names hold memory on `device`."""
        memo: Dict[int, Any] = dict(self.shared)
        for name, module in self.model.named_modules():
            if id(module) in self.inside:
                continue
            for parameter in module.parameters(recurse=False):
                if name in held and id(parameter) not in memo:
                    memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device))
            for buffer in module.buffers(recurse=False):
                memo[id(buffer)] = torch.empty_like(buffer, device=device)
        return _copied(self.model, memo)

    def layer(self, number: int, device: torch.device) -> nn.Module:
        """A layer of its own, with memory on `device`."""
        layer = self.layers[number]
        memo: Dict[int, Any] = {id(one): torch.empty_like(one, device=device) for one in layer.buffers()}
        for one in layer.parameters():
            memo[id(one)] = nn.Parameter(torch.empty_like(one, device=device), requires_grad=one.requires_grad)
        found = _copied(layer, memo)
        del found.__dict__["forward"]
        return found

    def release(self, model: nn.Module, held: Set[str]) -> None:
        """Leaves parameters of a copy to its modules of these names alone, where others are tied to them."""
        for name, module in model.named_modules():
            if id(module) not in self.inside and name not in held:
                for key, one in module.named_parameters(recurse=False):
                    module._parameters[key] = nn.Parameter(torch.empty_like(one, device="meta"))

    def zeros(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        held: AbstractSet[str] = frozenset(),
        trained: bool = False,
    ) -> None:
        """Puts zeros that take no memory in the place of weights outside the layers that are on the device meta, but
        for those of the modules `held`."""
        made: Dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            if id(module) in self.inside:
                continue
            for name, one in list(module.named_parameters(recurse=False)):
                known = made.get(id(one))
                if path not in held and known is None and (one.is_meta or getattr(one, "stands_in", False)):
                    zeros = torch.zeros(1, dtype=dtype, device=device).expand(one.shape)
                    made[id(one)] = known = nn.Parameter(zeros, requires_grad=trained)
                    known.stands_in = True  # type: ignore[attr-defined]
                if known is not None:
                    module._parameters[name] = known
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def _look(self, sequence_length: int) -> None:
        """Finds out what is before the layers and what behind them, and what crosses."""
        length = min(sequence_length, LENGTH)
        zeros = torch.zeros(1, length, dtype=torch.int64)
        other = torch.arange(1, length + 1).remainder(self._vocab_size)[None]
        calls = self._probe_any(zeros)
        again = self._called(self._passed(other, torch.float32, True))
        self.by_tokens = not all(_same(one, two) for one, two in zip(calls, again))
        self._parts(zeros)

    def _probe_any(self, tokens: Tensor) -> List[Call]:
        """With layers that return as many values as the forward pass takes."""
        raised: Optional[Exception] = None
        for self._results in RESULTS:
            try:
                return self._probe(tokens)
            except EngineError as error:
                raise EngineError(f"{self.name} cannot be cut: {error}") from error
            except Exception as error:  # noqa: BLE001  (as the family's own code, which takes a tuple apart, fails)
                raised = raised or error
        raise EngineError(f"{self.name} cannot be cut: {raised}") from raised

    def _skeleton(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        key = device, dtype
        if key not in self._skeletons:
            model = self.copied(set(), torch.device("cpu"))
            fill(model, "", None, 0)
            self.zeros(model, dtype, device, trained=True)
            self._skeletons[key] = model
        return self._skeletons[key]

    def _probe(self, tokens: Tensor) -> List[Call]:
        """What each layer is given, where `crossing` is found out: what of it depends on weights."""
        with torch.enable_grad():
            found = self._passed(tokens, torch.float32, True)
        self.hidden = wire_of("hidden", hidden_of(*found[0]), tokens.shape)

        def whole() -> List[Arguments]:
            return self._passed(tokens.new_zeros(1, self.sequence_length), torch.float32, True)

        self.crossing = crossings(self.layers, found, tokens.shape, whole, (1, self.sequence_length))
        return self._called(found)

    def _called(self, passed: Sequence[Arguments]) -> List[Call]:
        calls = []
        for (args, kwargs), crossing in zip(passed, self.crossing):
            x = hidden_of(args, kwargs)
            flat, spec = flat_of(args, kwargs)
            flat = [HELD if one is x else one.detach() if isinstance(one, Tensor) else one for one in flat]
            flat = [None if isinstance(one, Other) else one for one in flat]
            for one in crossing:
                flat[one.at] = CROSSING
            calls.append(Call(flat, spec))
        return calls

    def _passed(
        self, tokens: Tensor, dtype: torch.dtype, training: bool, positions: Optional[Tensor] = None, way: int = 0
    ) -> List[Arguments]:
        """What each layer is given, of a micro-batch, whose hidden states are not the right ones."""
        skeleton = self._skeleton(tokens.device, dtype).train(training)
        found: List[Arguments] = []
        passed: List[Tensor] = []

        def handler(number: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            x = hidden_of(args, kwargs)
            if number != len(found):
                raise _Between(
                    f"its layers are not passed once each in their order (layer {number} comes as {len(found)})"
                )
            if passed and x is not passed[-1]:
                raise _Between(f"it changes what layer {number - 1} gives before layer {number} takes it")
            found.append((args, kwargs))
            if len(found) == len(self.layers):
                raise Enough
            passed.append(x.view_as(x))
            return self.given(passed[-1], number)

        with self.routed(handler):
            try:
                skeleton(input_ids=tokens, use_cache=False, **placed(positions, way, self.config, dtype))
            except Enough:
                return found
        raise _Between("its forward pass does not pass all of its layers")

    def _parts(self, tokens: Tensor) -> None:
        """Which modules with weights are used before the first layer, and which after it."""
        skeleton = self._skeleton(tokens.device, torch.float32)
        names = {id(module): name for name, module in skeleton.named_modules() if id(module) not in self.inside}
        seen: List[Set[str]] = [self.first, self.last]
        at = [0]

        def hook(module: nn.Module, *_: Any) -> None:
            if at[0] not in (0, len(self.layers)):
                raise _Between(f"{names[id(module)]} is used between its layers")
            seen[at[0] > 0].add(names[id(module)])

        def handler(number: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            at[0] = number + 1
            return self.given(hidden_of(args, kwargs), number)

        weighted = {
            name: module
            for name, module in skeleton.named_modules()
            if id(module) in names and any(True for _ in module.parameters(recurse=False))
        }
        hooks = [module.register_forward_pre_hook(hook) for module in weighted.values()]
        try:
            with torch.no_grad(), self.routed(handler), _SmallProducts():
                out = skeleton(input_ids=tokens, use_cache=False)
        except _Between as error:
            raise EngineError(f"{self.name} cannot be cut: {error}") from error
        finally:
            for one in hooks:
                one.remove()
        self.logits = tuple(logits_of(out).shape[2:])
        self.first |= weighted.keys() - self.last


class _Between(Exception):
    """Why a model cannot be cut between its layers."""


class _Routed:
    """In the place of a layer's forward pass."""

    def __init__(self, told: Any, number: int) -> None:
        self._told = told
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._told.handler(self._number, args, kwargs)

    def __deepcopy__(self, memo: Dict[int, Any]) -> _Routed:
        return self


class _SmallProducts(TorchFunctionMode):
    """Products with large matrices, which are all zeros here, are not computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].numel() > MOST_WEIGHTS:
            return args[0].new_zeros(1).expand(*args[0].shape[:-1], len(args[1]))
        return func(*args, **(kwargs or {}))


def owner_of(model: nn.Module, path: str) -> Any:
    """Return the innermost model of transformers that a module of it is in."""
    pretrained = transformers().PreTrainedModel
    found = [one for name, one in model.named_modules() if not name or path.startswith(f"{name}.")]
    return next(one for one in reversed(found) if isinstance(one, pretrained))


def logits_of(out: Any) -> Tensor:
    """Take the logits out of what a model returns."""
    return out.logits if hasattr(out, "logits") else out[0]


def _copied(module: nn.Module, memo: Dict[int, Any]) -> nn.Module:
    """A deep copy that shares configurations."""
    for one in module.modules():
        config = getattr(one, "config", None)
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(module, memo)


def _kinds(layers: Sequence[nn.Module]) -> Sequence[str]:
    """A name for each layer: the same for those that compute the same with tensors of the same sizes."""
    keys = []
    for layer in layers:
        shapes = tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())
        plain = tuple(
            (name, key, value)
            for name, part in layer.named_modules()
            for key, value in sorted(vars(part).items())
            if isinstance(value, (bool, int, float, str)) and "idx" not in key and "index" not in key
        )
        keys.append(("layer", type(layer).__name__, shapes, plain))
    return kinds_of(keys)


def _same(one: Call, other: Call) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
        return a is b or (isinstance(a, (bool, int, float, str)) and a == b) or type(a) is type(b)

    return len(one.flat) == len(other.flat) and all(equal(a, b) for a, b in zip(one.flat, other.flat))
