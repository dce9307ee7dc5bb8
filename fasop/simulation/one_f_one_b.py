"""1F1B for many pipelines at once, in fewer operations of numpy than other schedules (`fasop.simulation.vectorised`).

With n stages, forward pass m of stage s is in step s + m of a common clock while m < n - s, which runs ahead, and in
step s + 2m after that; backward pass m in step 2n - 1 - s + 2m. Between sending what a pass waits for and that pass the
sender does nothing else: so its own time gives when the message is there, and messages need not be kept. Once stages
alternate, every second one does a forward pass and those between a backward pass, and neighbours trade messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.simulation.times import Longest, Times, Traffic, last_of


class Turn(IntEnum):
    """Which stages do forward passes in a step, if they do any; the others do backward passes."""

    EVEN = 0
    ODD = 1
    ALL = 2
    NONE = 3


class Step(NamedTuple):
    """Stages that do a pass at the same time."""

    turn: Turn
    passing: slice
    waiting: slice
    """Those of them that wait for a message."""
    sending: slice
    """Those that sent it, in the same order."""
    pairs: bool
    """Whether they are the same, and neighbours trade their messages."""


class Plan(NamedTuple):
    """The steps of so many stages and micro-batches."""

    steps: tuple[Step, ...]
    """That differ."""
    order: tuple[int, ...]
    """Their numbers, as they come."""


@lru_cache(maxsize=4096)
def plan(stages: int, micro_batches: int) -> Plan:
    numbers: dict[str, int] = {}
    steps: list[Step] = []
    order = []
    for step in _steps(stages, micro_batches - 1):
        number = numbers.setdefault(str(step), len(steps))
        if number == len(steps):
            steps.append(step)
        order.append(number)
    return Plan(tuple(steps), tuple(order))


def _steps(n: int, last: int) -> Iterator[Step]:
    """Of `n` stages; `last` is the number of the last micro-batch."""
    for clock in range(2 * (n + last)):
        if clock < n:
            low = max(0, clock - last)
            above = slice(max(1, low), clock + 1)
            yield Step(Turn.ALL, slice(low, clock + 1), above, slice(above.start - 1, clock), False)
            continue
        first_forward = _from(max(0, 2 * n - clock, clock - 2 * last), clock)
        first_backward = _from(max(0, 2 * n - 1 - clock), clock + 1)
        last_backward = 2 * n - 1 - clock + 2 * last
        if first_forward < n:
            # The stage below the first forward pass trades with it, if it has a backward pass; those further down
            # have no forward passes left, and do a backward pass every second step.
            low = max(first_forward - 1, 0)
            pairs = slice(low + (low - clock - 1) % 2, n)
            pairs = slice(pairs.start, n - (n - pairs.start) % 2)
            yield Step(Turn(clock % 2), slice(low, n), pairs, pairs, True)
            last_backward = low - 2
        if first_backward <= min(n - 1, last_backward):
            passing = slice(first_backward, min(n - 1, last_backward) + 1, 2)
            waiting = slice(first_backward, min(n - 2, last_backward) + 1, 2)
            yield Step(Turn.NONE, passing, waiting, slice(waiting.start + 1, waiting.stop + 1, 2), False)


def _from(low: int, parity: int) -> int:
    """The first number of that parity, not below `low`."""
    return low + (parity - low) % 2


def ends(micro_batches: int, times: Times, traffic: Traffic | None = None) -> Floats:
    """[stages, pipelines]: when each stage has done its last pass. Without `traffic` no message waits for a link; with
    it messages may wait until their link has sent the one before.
    """
    now = times.start.copy()
    stages = plan(len(now), micro_batches)
    views, links = _views(stages, times, now), None if traffic is None else _Links(stages, traffic, now.shape)
    for number in stages.order:
        sender, takes, sent, message, waiting, passing, duration = views[number]
        if links is None:
            np.add(sender, takes, out=sent)
        else:
            links.begin(number, sender, sent)
            np.add(sent, takes, out=sent)
        np.maximum(waiting, message, out=waiting)
        np.add(passing, duration, out=passing)
    return now


class _Links:
    """Until when links are occupied.

    A step's messages are those that its senders made last: while all do forward passes activations, and afterwards in
    every second step the even stages' gradients and the odd ones' activations, in the others the other way round.
    """

    def __init__(self, whole: Plan, traffic: Traffic, shape: tuple[int, ...]) -> None:
        busy = _by_turn(traffic.forward, traffic.backward)
        shared = traffic.one_way_out[1:-1]  # the first and the last stage have one neighbour alone
        one = np.full(shape, -np.inf)
        self._free = (one, one, one) if shared.all() else (one.copy(), one.copy(), one)
        """By turn, those of all stages."""
        self._both = 1 + np.nonzero(shared)[0] if shared.any() and not shared.all() else None
        self._filling = True
        self._parts = []
        for turn, _, _, sending, _ in whole.steps:
            mine = sending.start % 2 if turn is Turn.NONE else int(turn)
            self._parts.append((turn, mine, self._free[mine][sending], busy[turn][sending]))

    def begin(self, number: int, made: Floats, out: Floats) -> None:
        """When the links of a step's messages begin with them."""
        turn, mine, free, busy = self._parts[number]
        if self._filling and turn is not Turn.ALL:
            even, odd, every = self._free
            even[1::2], odd[::2], self._filling = every[1::2], every[::2], False
        np.maximum(made, free, out=out)
        np.add(out, busy, out=free)
        if self._both is not None:
            for other in self._free:
                other[self._both] = self._free[mine][self._both]


def longest(micro_batches: int, times: Times, after: Floats, traffic: Traffic | None = None) -> Longest:
    """Why the last stage ends so late, if `after` [stages, pipelines] comes after each one's last pass. Without
    `traffic` no message waits for a link.
    """
    now = times.start.copy()
    stages, (count, columns) = plan(len(now), micro_batches), now.shape
    views = _views(stages, times, now)
    links = None if traffic is None else _Links(stages, traffic, now.shape)
    waited = np.zeros((len(stages.order), count, columns), bool)
    queued = waited if links is None else np.zeros_like(waited)
    for step, number in enumerate(stages.order):
        sender, takes, sent, message, waiting, passing, duration = views[number]
        if links is None:
            np.add(sender, takes, out=sent)
        else:
            links.begin(number, sender, sent)
            np.greater(sent, sender, out=queued[step, stages.steps[number].sending])
            np.add(sent, takes, out=sent)
        np.greater(message, waiting, out=waited[step, stages.steps[number].waiting].reshape(waiting.shape))
        np.maximum(waiting, message, out=waiting)
        np.add(passing, duration, out=passing)
    now += after
    forwards, passing_in, sends = _tables(count, micro_batches)
    # A forward pass waits for the stage before, a backward pass for the one behind.
    moves = waited * np.where(forwards, np.int8(-1), np.int8(1))[:, :, np.newaxis]
    every, at = np.arange(columns), np.argmax(now, axis=0)
    visited = np.empty((len(moves), columns), np.int64)
    passed = np.ones_like(visited, bool)
    if traffic is None:
        for step in range(len(moves) - 1, -1, -1):
            visited[step] = at
            at = at + moves[step][at, every]
    else:
        sends = np.where(traffic.one_way_out, sends > 0, sends)
        behind = np.zeros(columns, sends.dtype)
        """Whose link, forward or backward, the path follows to the message before."""
        for step in range(len(moves) - 1, -1, -1):
            walking = behind == 0
            visited[step], passed[step] = at, walking
            move = np.where(walking, moves[step][at, every], 0)
            at = at + move
            link = sends[step][at]
            here = np.where(walking, move != 0, link == behind)
            behind = np.where(here, link * queued[step][at, every], behind)
    rows, cells = np.arange(len(moves))[:, np.newaxis], visited * columns + every
    on, forward = passing_in[rows, visited] & passed, forwards[rows, visited]
    ahead, back = (np.bincount(cells[on & which], minlength=now.size) for which in (forward, ~forward))
    start = np.zeros_like(now)
    start[at, every] = 1
    return Longest(
        forward=ahead.reshape(now.shape).astype(float),
        backward=back.reshape(now.shape).astype(float),
        start=start,
        end=last_of(now),
        total=now.max(axis=0),
    )


@lru_cache(maxsize=256)
def _tables(stages: int, micro_batches: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int8]]:
    """[steps, stages]: whether a pass of a stage is a forward one, and whether the stage does any; and which message of
    a stage is waited for: 0 none, 1 activations, 2 gradients.
    """
    whole = plan(stages, micro_batches)
    passing, sending = np.zeros((2, len(whole.steps), stages), bool)
    for doing, giving, step in zip(passing, sending, whole.steps, strict=True):
        doing[step.passing] = giving[step.sending] = True
    even, order = np.arange(stages) % 2 == 0, np.array(whole.order)
    by_turn = np.array([even, ~even, np.ones(stages, bool), np.zeros(stages, bool)])
    activations = np.array([~even, even, np.ones(stages, bool), np.zeros(stages, bool)])
    turns = [step.turn for step in whole.steps]
    sends = sending * np.where(activations[turns], np.int8(1), np.int8(2))
    return by_turn[turns][order], passing[order], sends[order]


def _by_turn(ahead: Floats, back: Floats) -> tuple[Floats, ...]:
    """Of the messages that the others sent, from what those forward and backward take."""
    even = (np.arange(len(ahead)) % 2 == 0)[:, np.newaxis]
    return np.where(even, back, ahead), np.where(even, ahead, back), ahead, back


def _views(whole: Plan, times: Times, now: Floats) -> list[tuple[Floats, ...]]:
    """For each step, parts of arrays: the times of senders, how long their messages take, where it is noted when those
    are there, the same in the order of who waits, the times of those; and of all that do a pass, and how long it takes.

    In `now` a sender has just done a pass of the other sort than it does next, if it trades.
    """
    even, columns = (np.arange(len(now)) % 2 == 0)[:, np.newaxis], now.shape[1]
    forward, backward, ahead, back = times[:4]
    durations = (np.where(even, forward, backward), np.where(even, backward, forward), forward, backward)
    messages = _by_turn(ahead, back)
    noted = np.empty_like(now)
    views: list[tuple[Floats, ...]] = []
    for turn, passing, waiting, sending, pairs in whole.steps:
        own, sent = now[waiting], noted[sending]
        message = sent
        if pairs:
            own = own.reshape(len(own) // 2, 2, columns)
            message = sent.reshape(own.shape)[:, ::-1]
        takes, duration = messages[turn][sending], durations[turn][passing]
        views.append((now[sending], takes, sent, message, own, now[passing], duration))
    return views
