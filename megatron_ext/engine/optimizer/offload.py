"""An optimizer whose state lies in the host's memory, and passes through the device piece by piece in each update."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from megatron_ext.contract import parallel_config
from megatron_ext.contract.run_files import EMA, WEIGHTS
from megatron_ext.contract.train_config import KINDS, TrainConfig
from megatron_ext.engine.gradients.share import Share
from megatron_ext.engine.optimizer.update_rules import Piece, TorchRule, Unscaled, UpdateRule, kept_kinds
from megatron_ext.parallel.comm import mark


class HostState:
    """Tensors [n], fp32, in the host's memory, of which the device has a few pieces at a time.

    On a GPU the memory is pinned. One stream brings pieces, another takes them back, and the GPU's streams wait for
    each other: the host waits only to read.
    """

    def __init__(self, names: Sequence[str], pieces: Sequence[slice], device: torch.device) -> None:
        self.pieces = pieces
        self._pinned = device.type == "cuda"
        lengths = [here.stop - here.start for here in pieces]
        # Each piece by itself: torch rounds pinned memory up to a power of 2, which a whole piece is.
        self._kept = {name: [self._zeros(length) for length in lengths] for name in names}
        self._slots = [
            {name: torch.zeros(max(lengths), device=device) for name in names}
            for _ in range(min(parallel_config.SLOTS if self._pinned else 1, len(pieces)))
        ]
        self._in: Optional[torch.cuda.Stream] = None
        self._out: Optional[torch.cuda.Stream] = None
        if self._pinned:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._in.wait_event(mark())  # until the slots have their zeros
        self._free: List[Optional[torch.cuda.Event]] = [None for _ in self._slots]
        """For each slot, when what was in it is back."""

    def _zeros(self, length: int) -> Tensor:
        zeros = torch.zeros(length)
        return zeros.pin_memory() if self._pinned else zeros

    def on_device(self, number: int) -> Dict[str, Tensor]:
        """Return where a piece lies while it is on the device."""
        here = self.pieces[number]
        return {name: slot[: here.stop - here.start] for name, slot in self._slots[number % len(self._slots)].items()}

    def passing(self, here: slice) -> Iterator[int]:
        """Brings the pieces `here`, one after another, and takes back each when the next one is asked for.

        The first ones come while the device still works on what it was given before."""
        numbers = [n for n, piece in enumerate(self.pieces) if here.start <= piece.start and piece.stop <= here.stop]
        arrived = {number: self._bring(number) for number in numbers[: len(self._slots)]}
        for place, number in enumerate(numbers):
            event = arrived.pop(number)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            yield number
            self._return(number)
            if place + len(self._slots) < len(numbers):
                following = numbers[place + len(self._slots)]
                arrived[following] = self._bring(following)

    def _bring(self, number: int) -> Optional[torch.cuda.Event]:
        if self._in is None:
            self._copy_in(number)
            return None
        with torch.cuda.stream(self._in):
            free = self._free[number % len(self._slots)]
            if free is not None:
                self._in.wait_event(free)
            self._copy_in(number)
            return mark()

    def _copy_in(self, number: int) -> None:
        for name, target in self.on_device(number).items():
            target.copy_(self._kept[name][number], non_blocking=True)

    def _return(self, number: int) -> None:
        if self._out is None:
            self._copy_out(number)
            return
        self._out.wait_event(mark())
        with torch.cuda.stream(self._out):
            self._copy_out(number)
            self._free[number % len(self._slots)] = mark()

    def _copy_out(self, number: int) -> None:
        for name, source in self.on_device(number).items():
            self._kept[name][number].copy_(source, non_blocking=True)

    def read(self, name: str) -> Tensor:
        """Return a copy of a whole tensor, on the host."""
        self._wait()
        return torch.cat(self._kept[name]) if self.pieces else torch.zeros(0)

    def write(self, name: str, values: Tensor) -> None:
        """Gives a whole tensor new values."""
        self._wait()
        for here, kept in zip(self.pieces, self._kept[name]):
            kept.copy_(values[here])

    def _wait(self) -> None:
        for event in self._free:
            if event is not None:
                event.synchronize()


class OffloadedRule(UpdateRule):
    """Steps by torch's optimizers, as `TorchRule`, what a `HostState` keeps: the moments, the average of the weights
    and, unless the model's weights are the ones that are stepped, these in fp32. It gives the model its weights, too.
    """

    def __init__(
        self,
        model: Tensor,
        share: Share,
        is_weight: bool,
        gradient: Tensor,
        pieces: Sequence[Piece],
        train: TrainConfig,
        cuts: Sequence[int],
        at_once: bool,
    ) -> None:
        """`model` has the flat weights in the model's precision, which are those that are stepped if `is_weight`;
        `gradient` [n] and `pieces` are of this rank's share of them, whose ends are at `cuts`, too."""
        self.kinds, self.unscales, self._train, self._is_weight = KINDS[train.optimizer], at_once, train, is_weight
        self._names = [*kept_kinds(train), *([] if is_weight else [WEIGHTS]), *([EMA] if train.ema is not None else [])]
        ends = sorted({*cuts, *range(parallel_config.PIECE, share.length, parallel_config.PIECE), share.length} - {0})
        self._host = HostState(self._names, [slice(a, b) for a, b in zip([0, *ends], ends)], model.device)
        self._model, self._length = model, share.length
        self._places = [share.places(here) for here in self._host.pieces]
        self._masters = [
            nn.Parameter(model[here] if is_weight else self._host.on_device(number)[WEIGHTS])
            for number, here in enumerate(self._host.pieces)
        ]
        """The weights of each piece, while it is on the device."""
        self._rules = [self._rule(number, gradient, pieces) for number in range(len(ends))]

    def _rule(self, number: int, gradient: Tensor, pieces: Sequence[Piece]) -> TorchRule:
        """Make the rule of a piece, whose moments lie where it passes through the device."""
        here, there, master = self._host.pieces[number], self._host.on_device(number), self._masters[number]
        master.grad = gradient[here]
        inside = [piece._replace(here=_within(piece.here, here)) for piece in pieces]
        moments = {kind: there[kind] for kind in kept_kinds(self._train)}
        return TorchRule(master, inside, self._train, (), self.unscales, moments)

    def begin(self, weights: Tensor) -> None:
        """Takes the first weights [n], fp32."""
        for name in {WEIGHTS, EMA}.intersection(self._names):
            self._host.write(name, weights)

    @torch.no_grad()
    def step(self, lr: float, updates: int, here: slice, unscaled: Optional[Unscaled] = None) -> None:
        for number in self._host.passing(here):
            master, there = self._masters[number].data, self._host.on_device(number)
            self._rules[number].step(lr, updates, slice(0, len(master)), unscaled)
            if EMA in there:
                weight = torch.full((), 1.0 - float(self._train.ema or 0.0), device=self._model.device)
                there[EMA].lerp_(master, weight if unscaled is None else weight * (1.0 - unscaled.overflow))
            self._give(number, master)

    def _give(self, number: int, weights: Tensor) -> None:
        if not self._is_weight:
            for target, source in self._places[number]:
                self._model[target].copy_(weights[source])

    def state(self) -> Dict[str, Tensor]:
        """Return copies on the host; of the weights, too, where it keeps them."""
        zeros = {kind: torch.zeros(self._length) for kind in self.kinds if kind not in self._names}
        return {**zeros, **{name: self._host.read(name) for name in self._names}}

    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        for name in self._names:
            self._host.write(name, state[name])
        for rule in self._rules:
            rule.counts(updates)
        if self._is_weight:
            self._model.copy_(state[WEIGHTS])
        for number, here in enumerate(self._host.pieces):
            self._give(number, state[WEIGHTS][here])

    def average(self) -> Tensor:
        """Return a copy of the average of the weights, on the host."""
        return self._host.read(EMA)


def _within(inner: slice, outer: slice) -> slice:
    """Where that part of `inner` lies in `outer` that is in both."""
    start = min(max(inner.start, outer.start), outer.stop)
    stop = max(start, min(inner.stop, outer.stop))
    return slice(start - outer.start, stop - outer.start)
