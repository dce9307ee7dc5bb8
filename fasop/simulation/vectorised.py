"""Simulates one schedule for thousands of pipelines at once: exactly what `simulate` says, many times faster.

All actions of a step (`fasop.simulation.steps`) are done together as rows of an array, and all pipelines as its
columns; how long they really take only enters by the maximum of what an action waits for.

Where every pass takes longer than the messages before it occupy their link, no message waits for another one: only
the other pipelines need to know when links are free.

Where `fasop.compiled` was built, it does the same in much less time, action by action.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import replays as compiled
from fasop.costs.arrays import Floats
from fasop.simulation.steps import PASSES, SHARES, Pass, Steps, steps
from megatron_ext.contract.parallel_config import Schedule

Integers32 = NDArray[np.intc]


class Times(NamedTuple):
    """What stages take for one micro-batch."""

    forward: Floats
    """[parts, pipelines]; part c * stages + s is chunk c of stage s."""
    backward: Floats
    """Likewise; of a split backward pass each half takes half of it."""
    send_forward: Floats
    """[stages, pipelines]: from the end of a forward pass until the following stage has its result."""
    send_backward: Floats
    """Likewise, until the stage before has it."""
    start: Floats
    """[stages, pipelines]: when a stage begins."""

    def take(self, columns: NDArray[np.int64]) -> Times:
        return Times(*(_some(kind, columns) for kind in self))


class Traffic(NamedTuple):
    """How messages occupy the links that they leave by."""

    forward: Floats
    """[stages, pipelines]: seconds until the link takes the next message."""
    backward: Floats
    one_way_out: NDArray[np.bool_]
    """[stages]: whether a stage's messages to both neighbours leave by the same link."""

    @classmethod
    def whole(cls, times: Times) -> Traffic:
        """Make the traffic of links that take no message before the last one has arrived."""
        stages = len(times.start)
        return cls(times.send_forward, times.send_backward, np.full(stages, stages == 2))

    def take(self, columns: NDArray[np.int64]) -> Traffic:
        return Traffic(_some(self.forward, columns), _some(self.backward, columns), self.one_way_out)


def _some(values: Floats, columns: NDArray[np.int64]) -> Floats:
    """Take some pipelines; what all have in common has one column."""
    return values if values.shape[1] == 1 else values[:, columns]


class Longest(NamedTuple):
    """The chain of passes and messages, each waiting for the one before, that ends last: how often a pass is on it."""

    forward: Floats
    """[parts, pipelines]"""
    backward: Floats
    """[parts, pipelines]; half a pass counts one half."""
    start: Floats
    """[stages, pipelines]: 1 for the stage whose start it begins with."""
    end: Floats
    """[stages, pipelines]: 1 for the stage with whose last action it ends."""
    total: Floats
    """[pipelines]: when it ends, with what comes after."""
    messages: Floats | None = None
    """[2, stages, pipelines]: how often a message that a stage sends is on it, forward and backward, or one that
    occupies the link before it; None where stages wait until what they send has arrived."""


def last_of(now: Floats) -> Floats:
    """[stages, pipelines]: 1 for the stage that ends last, of equal ones the first; `now` is when each ends."""
    last = np.zeros_like(now)
    last[np.argmax(now, axis=0), np.arange(now.shape[1])] = 1
    return last


ROUNDING = 1e-12
"""The part of a time by which sums of the same times may differ."""


def ends(
    schedule: Schedule,
    micro_batches: int,
    times: Times,
    traffic: Traffic | None = None,
    matters: Callable[[Floats], NDArray[np.bool_]] | None = None,
) -> Floats:
    """[stages, pipelines]: when each stage has done its last action.

    `matters` says of such ends, which may be too early, which pipelines need the right ones; without, all do.
    """
    traffic = Traffic.whole(times) if traffic is None else traffic
    queued = may_queue(schedule, times, traffic)
    if matters is None and queued.all():
        return _ends(schedule, micro_batches, times, traffic)
    now = _ends(schedule, micro_batches, times)
    if matters is not None and queued.any():
        queued &= matters(now)
    if (some := np.nonzero(queued)[0]).size:
        now[:, some] = _ends(schedule, micro_batches, times.take(some), traffic.take(some))
    return now


def may_queue(schedule: Schedule, times: Times, traffic: Traffic) -> NDArray[np.bool_]:
    """[pipelines]: whether a message could be made before the link has sent the one before it.

    Between two messages a stage does a pass, that of the later one at least. Without chunks the first stage has no
    gradients to send, and the last one no activations.
    """
    stages, columns = times.start.shape
    forward, backward = times.forward, schedule.definition.input_share * times.backward
    sends = [slice(0, -1), slice(1, None)]
    if len(forward) > stages:
        forward, backward = (kind.reshape(-1, stages, kind.shape[1]).min(axis=0) for kind in (forward, backward))
        sends = [slice(0, stages), slice(0, stages)]
    queued: NDArray[np.bool_] = np.zeros(columns, bool)
    for passing, busy, where in zip((forward, backward), (traffic.forward, traffic.backward), sends, strict=True):
        queued |= (busy[where] > passing[where]).any(axis=0)
    both = np.nonzero(traffic.one_way_out)[0]
    both = both if len(forward) < len(times.forward) else both[(both > 0) & (both < stages - 1)]
    if len(both):
        queued |= ((traffic.backward[both] > forward[both]) | (traffic.forward[both] > backward[both])).any(axis=0)
    return queued


def _ends(schedule: Schedule, micro_batches: int, times: Times, traffic: Traffic | None = None) -> Floats:
    """`ends`; without `traffic` no message waits for a link."""
    links = None if traffic is None else _Links(times, traffic)
    if compiled is not None:
        return compiled.ends(*_compiled(schedule, micro_batches, times, links))
    plan, compute, send = _prepared(schedule, micro_batches, times)
    now = times.start.copy()
    messages, begins = np.zeros((plan.slots, *now.shape[1:])), np.empty_like(now)
    for kind, stages, parts, reads, writes in plan.steps:
        done = now[stages]
        if kind is Pass.WEIGHT:
            done += compute[kind][parts]
            continue
        np.maximum(done, messages[reads], out=done)
        done += compute[kind][parts]
        begin = done if links is None else links.begin(kind, stages, parts, done, begins[stages])
        np.add(begin, send[kind][stages], out=messages[writes])
    return now


def links_of(one_way_out: NDArray[np.bool_], chunks: int) -> Integers32:
    """[2, stages]: numbers of the links by which the messages of stages with so many chunks leave, forward and
    backward."""
    one_way_out = one_way_out.copy()
    if chunks == 1:
        one_way_out[[0, -1]] = one_way_out[1:-1].all()  # they have one neighbour alone
    found = np.arange(2 * len(one_way_out), dtype=np.intc).reshape(2, -1)
    np.copyto(found[1], found[0], where=one_way_out)
    return found


class _Links:
    """Until when each link is occupied."""

    def __init__(self, times: Times, traffic: Traffic) -> None:
        stages, columns = times.start.shape
        parts = len(times.forward)
        self.busy = np.empty((2, parts, columns))
        """For each direction, [parts, pipelines]: how long a message occupies its link."""
        by_chunk = self.busy.reshape(2, -1, stages, columns)
        by_chunk[0], by_chunk[1] = traffic.forward, traffic.backward
        self.busy[0, -1] = self.busy[1, 0] = 0.0  # the last part sends nothing forward, and the first nothing back
        self.of = links_of(traffic.one_way_out, parts // stages)
        self._one_way_out = self.of[1] == self.of[0]

    @cached_property
    def free(self) -> tuple[Floats, Floats]:
        """[stages, pipelines]: when the links forward and backward are free, the same array where they are one."""
        forward = np.full((len(self._one_way_out), self.busy.shape[2]), -np.inf)
        return forward, forward if self._one_way_out.all() else forward.copy()

    def begin(self, kind: Pass, stages: slice, parts: slice, made: Floats, out: Floats) -> Floats:
        """When links begin with messages that are made at these times, in the place of `out`."""
        way = min(kind, 1)
        free = self.free[way][stages]
        np.maximum(made, free, out=out)
        np.add(out, self.busy[way][parts], out=free)
        if not self._one_way_out.all():
            self.free[1 - way][self._one_way_out] = self.free[way][self._one_way_out]
        return out


def longest(
    schedule: Schedule,
    micro_batches: int,
    times: Times,
    after: Floats,
    traffic: Traffic | None = None,
    known: Floats | None = None,
) -> Longest:
    """Why the iteration takes so long, if `after` [stages, pipelines] comes after each stage's last action.

    `known` [pipelines] is when it ends, if somebody has worked that out already.
    """
    traffic = Traffic.whole(times) if traffic is None else traffic
    found = _longest(schedule, micro_batches, times, after)
    some = np.nonzero(may_queue(schedule, times, traffic))[0]
    if some.size:
        # Of a pipeline that takes no longer for it, no message on the longest path waits for a link.
        if known is None:
            done = _ends(schedule, micro_batches, times.take(some), traffic.take(some))
            taken = (done + after[:, some]).max(axis=0)
        else:
            taken = known[some]
        some = some[taken > found.total[some] * (1 + ROUNDING)]
    if some.size:
        waiting = _longest(schedule, micro_batches, times.take(some), after[:, some], traffic.take(some))
        for whole, part in zip(found, waiting, strict=True):
            if whole is not None and part is not None:
                whole[..., some] = part
    return found


def _longest(
    schedule: Schedule, micro_batches: int, times: Times, after: Floats, traffic: Traffic | None = None
) -> Longest:
    """The schedule is gone through forwards as in `ends`, noting what each pass and each message waits for longest, and
    then back. Without `traffic` no message waits for a link."""
    links = None if traffic is None else _Links(times, traffic)
    if compiled is not None:
        return Longest(*compiled.longest(*_compiled(schedule, micro_batches, times, links), after, SHARES_OF_PASSES))
    plan, compute, send = _prepared(schedule, micro_batches, times)
    now = times.start.copy()
    messages = np.zeros((plan.slots, *now.shape[1:]))
    begins, nothing = np.empty_like(now), np.zeros(0, bool)
    waited, queued = [], []
    for kind, stages, parts, reads, writes in plan.steps:
        done = now[stages]
        if kind is Pass.WEIGHT:
            waited.append(nothing)
            queued.append(nothing)
            done += compute[kind][parts]
            continue
        message = messages[reads]
        waited.append(message > done)
        np.maximum(done, message, out=done)
        done += compute[kind][parts]
        begin = done
        if links is not None:
            begin = links.begin(kind, stages, parts, done, begins[stages])
            queued.append(begin > done)
        np.add(begin, send[kind][stages], out=messages[writes])
    now += after
    end = last_of(now)
    here, passes, on_way = end.copy(), np.zeros((2, *times.forward.shape)), np.zeros((2, *now.shape))
    messages[:] = 0
    every, behind = np.arange(len(times.forward)), np.zeros((2 * len(now), now.shape[1]))
    """Paths to a message that waited until its link had sent the one before."""
    for step in range(len(plan.steps) - 1, -1, -1):
        kind, stages, parts, reads, writes = plan.steps[step]
        if kind is Pass.WEIGHT:
            passes[1][parts] += SHARES[kind] * here[stages]
            continue
        sent = messages[writes].copy()
        messages[writes] = 0
        if links is not None:
            link = links.of[min(kind, 1)][stages]
            sent += behind[link]
            behind[link] = np.where(queued[step], sent, 0)
        sends = every[parts] != (0 if kind else every[-1])  # the model's ends send nothing
        on_way[min(kind, 1)][stages] += sent * sends[:, np.newaxis]
        if links is not None:
            sent[queued[step]] = 0
        on_path = here[stages] + sent
        passes[min(kind, 1)][parts] += SHARES[kind] * on_path
        here[stages] = np.where(waited[step], 0, on_path)
        messages[reads] = np.where(waited[step], on_path, 0)
    return Longest(passes[0], passes[1], start=here, end=end, total=now.max(axis=0), messages=on_way)


def _prepared(
    schedule: Schedule, micro_batches: int, times: Times
) -> tuple[Steps, tuple[Floats, ...], tuple[Floats, ...]]:
    """The steps, and by kind of pass what it takes and what sending its result takes."""
    stages = len(times.start)
    plan = steps(schedule, stages, len(times.forward) // stages, micro_batches)
    return plan, _passes(times), (times.send_forward, *3 * (times.send_backward,))


def _passes(times: Times) -> tuple[Floats, ...]:
    """Return what each kind of pass takes, [parts, pipelines]."""
    return times.forward, times.backward, *(SHARES[kind] * times.backward for kind in (Pass.INPUT, Pass.WEIGHT))


def _compiled(
    schedule: Schedule, micro_batches: int, times: Times, links: _Links | None
) -> tuple[Integers32, int, Floats, Floats, Floats, Floats, Integers32 | None]:
    """Return the arguments of `compiled.ends`."""
    stages, pipelines = times.start.shape
    actions, slots = actions_of(schedule, stages, len(times.forward) // stages, micro_batches)
    send = np.empty((2, stages, pipelines))
    send[0], send[1] = times.send_forward, times.send_backward
    busy, of_links = (np.empty((2, 0, pipelines)), None) if links is None else (links.busy, links.of)
    return actions, slots, _compute(times), send, times.start, busy, of_links


def _compute(times: Times) -> Floats:
    """[kinds, parts, pipelines]: what passes of each kind take."""
    found = np.empty((len(Pass), *times.forward.shape))
    for kind, taken in enumerate(_passes(times)):
        found[kind] = taken
    return found


SHARES_OF_PASSES = np.array([SHARES[kind] for kind in Pass])
_ROW: Any = np.dtype((np.intc, 3))


@lru_cache(maxsize=4096)
def actions_of(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> tuple[Integers32, int]:
    """All actions of an iteration, as `compiled.ordered` returns them."""
    lists = (schedule.definition.passes(stage, stages, chunks, micro_batches) for stage in range(stages))
    number = {kind: int(of) for kind, of in PASSES.items()}
    rows = [np.fromiter(((number[kind], m, chunk) for kind, m, chunk in own), _ROW, len(own)) for own in lists]
    return compiled.ordered(rows, chunks)
