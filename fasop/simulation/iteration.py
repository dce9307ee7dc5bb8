"""An iteration as a replay of its schedule and what follows, and where each stage's time goes. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from fasop.simulation.linear import Linear
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.ranks.replay import Event, RankDurations, StageTimes, TimedReplay, simulate
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.schedules import Actions

GRADIENTS, EMBEDDING, OPTIMIZER, NORM, WEIGHTS = (
    "grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer",
    "grad-norm-all-reduce",
    "params-all-gather",
)
"""Events after the schedule's, by the names of docs/formats.md; NORM and WEIGHTS lie inside OPTIMIZER."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What the stages take for an iteration; seconds, by stage."""

    times: Sequence[StageTimes]
    gradients: Sequence[float]
    """To sum them, as far as the backward pass does not hide it."""
    embedding: float
    """To sum its gradients over the first and the last stage."""
    optimizer: Sequence[float]
    """The step and, with a sharded optimizer, handing out its results."""
    weights: Sequence[float]
    """Handing them out alone."""
    blocking: bool = False
    """Whether stages wait until what they send has arrived."""

    @classmethod
    def of(cls, lines: Pipelines, handing: Linear, layers: Sequence[int]) -> Durations:
        """Read the durations off the one pipeline of `lines`; `layers` are by virtual stage."""
        whole = lines.held(np.array([layers]).T)
        return cls(
            times=stage_times(lines, layers),
            gradients=lines.exposed(whole)[:, 0].tolist(),
            embedding=float(lines.embedding[0]),
            optimizer=lines.optimizer.of(whole)[:, 0].tolist(),
            weights=handing.of(whole)[:, 0].tolist(),
            blocking=lines.blocking,
        )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Where a stage's time of one iteration goes; seconds, which together are the iteration."""

    forward: float
    backward: float
    messages: float
    """Waits for a message that is under way, or that its link has not begun with."""
    bubble: float
    """Waits for other stages: for a message that is not sent yet, and until all have their gradients."""
    gradients: float
    """Summing them over the replicas, as far as the backward pass does not hide it."""
    embedding: float
    """Summing its gradients over the first and the last stage."""
    optimizer: float
    weights: float
    """Handing out those that a sharded optimizer has updated."""

    def by_name(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def stage_times(lines: Pipelines, layers: Sequence[int]) -> list[StageTimes]:
    """What the stages of the one pipeline take for a micro-batch; `layers` are by virtual stage."""
    stages, column = lines.stages, np.array([layers]).T
    counted, (hop, busy), (back, busy_back) = (
        lines.counted(column),
        lines.messages(column),
        lines.messages_back(column),
    )
    forward, backward = (passes.of(counted)[:, 0].tolist() for passes in (lines.forward, lines.backward))
    return [
        StageTimes(
            forward=forward[stage::stages],
            backward=backward[stage::stages],
            send_forward=float(hop[stage, 0]),
            send_backward=float(back[stage - 1, 0]),
            busy_forward=float(busy[stage, 0]),
            busy_backward=float(busy_back[stage - 1, 0]),
            one_way_out=lines.one_way_out is not None and bool(lines.one_way_out[stage]),
        )
        for stage in range(stages)
    ]


def replay(schedule: Mapping[str, Any], durations: Durations) -> tuple[float, list[Event]]:
    """The length of an iteration, and its events: those of the schedule, and what follows them. Raises SearchError: the
    schedule never ends."""
    return replay_together([Pipeline(schedule, durations)])[:2]


class Pipeline(NamedTuple):
    """What some replicas do alike in an iteration, and what it takes them."""

    schedule: Mapping[str, Any]
    """Actions, as in docs/formats.md."""
    durations: Durations
    replicas: tuple[int, ...] = ()
    """Their numbers."""
    kinds: tuple[str, ...] = ()
    """Names of the kinds of node that each of them lies on, by stage."""


def replay_together(pipelines: Sequence[Pipeline]) -> tuple[float, list[Event], int]:
    """The same of replicas that do or take unlike things, and the number of the slowest, whose events these are.

    Every stage sums its gradients over the replicas, when the last of them has all; then the first and the last one sum
    those of the embedding. Once all are done, the norm is known to all, and each steps its optimizer and begins the
    next iteration. What replicas do together takes the same in all `durations`.
    """
    first = min(min(one.durations.optimizer) for one in pipelines)
    stages = len(pipelines[0].durations.optimizer)
    every, ends = [], []
    for one in pipelines:
        begin = [step - first for step in one.durations.optimizer]
        every.append(simulate(one.schedule, one.durations.times, begin, blocking=one.durations.blocking))
        ends.append([max(event.end for event in every[-1] if event.stage == stage) for stage in range(stages)])
    slowest = max(range(len(pipelines)), key=lambda number: max(ends[number]))
    computed, done, durations = every[slowest], ends[slowest], pipelines[slowest].durations
    last = [max(of_stage) for of_stage in zip(*ends, strict=True)]
    summed = [end + takes for end, takes in zip(last, durations.gradients, strict=True)]
    shared = list(summed)
    if stages > 1:
        shared[0] = shared[-1] = max(summed[0], summed[-1]) + durations.embedding
    known = max(shared)
    events = []
    for stage in range(stages):
        events += [event for event in computed if event.stage == stage]
        ends_here = _Ends(done[stage], last[stage], summed[stage], shared[stage], known)
        events += ends_here.events(stage, durations.optimizer[stage], durations.weights[stage])
    return known + first, events, slowest


class Iteration(NamedTuple):
    """What the ranks of a plan do, and what it takes."""

    seconds: float
    """From the end of one iteration to the end of the next."""
    events: Sequence[Sequence[Event]]
    """Events of each rank in the order of time."""


def iteration(layout: Layout, actions: Sequence[Sequence[Actions]], ranks: Sequence[RankDurations]) -> Iteration:
    """Simulate an iteration of ranks that take the actions of their stage and replica. Raises SearchError: the schedule
    never ends."""
    first = min(rank.optimizer for rank in ranks)
    places = (layout.stage_dp_tp(rank) for rank in range(layout.world_size))
    taken = [[(one.kind.value, one.micro_batch, one.chunk) for one in actions[stage][dp]] for stage, dp, _ in places]
    begins = [rank.optimizer - first for rank in ranks]
    events = TimedReplay(layout, taken, [rank.times for rank in ranks], begins).run()
    ends = [max(event.end for event in own) if own else 0.0 for own in events]
    groups = layout.data_groups()
    last = {rank: max(ends[other] for other in group) for group in groups for rank in group}
    summed = [last[rank] + one.gradients for rank, one in enumerate(ranks)]
    tied = [rank for rank in range(layout.world_size) if layout.stage_dp_tp(rank)[0] in (0, layout.stages - 1)]
    shared = list(summed)
    if layout.stages > 1:
        both = max(summed[rank] for rank in tied) + max(ranks[rank].embedding for rank in tied)
        for rank in tied:
            shared[rank] = both
    known = max(shared)
    for rank, own in enumerate(ranks):
        ends_here = _Ends(ends[rank], last[rank], summed[rank], shared[rank], known)
        events[rank] += ends_here.events(layout.stage_dp_tp(rank)[0], own.optimizer, own.weights)
    return Iteration(known + first, events)


def computed_until(events: Sequence[Event]) -> float:
    """When a rank has done its last action of the schedule."""
    return max((event.end for event in events if event.micro_batch >= 0), default=0.0)


class _Ends(NamedTuple):
    """When something has ended that follows a schedule."""

    passes: float
    of_last: float
    """The passes of the last replica."""
    summed: float
    shared: float
    """Summing the embedding's gradients."""
    known: float
    """All of this on all ranks."""

    def events(self, stage: int, optimizer: float, weights: float) -> list[Event]:
        """Those after the schedule's; `optimizer` and `weights` are what these take."""
        stepped = self.known + optimizer
        spans = {
            GRADIENTS: (self.passes, self.summed),
            EMBEDDING: (self.summed, self.shared),
            NORM: (self.shared, self.known),
            WEIGHTS: (stepped - weights, stepped),
            OPTIMIZER: (self.shared, stepped),
        }
        sent = self.of_last if self.of_last > self.passes else None
        return [
            Event(stage, name, -1, 0, begin, end, sent if name == GRADIENTS else None)
            for name, (begin, end) in spans.items()
            if end > begin or name in (NORM, OPTIMIZER)
        ]


def waiting(event: Event, embedding: float) -> float:
    """The part of an event in which its stage waits for others; `embedding` is what summing its gradients takes."""
    took = event.end - event.start
    if event.sent is not None:
        return max(0.0, event.sent - event.start)
    if event.kind == EMBEDDING:
        return max(0.0, took - embedding)
    return took if event.kind == NORM else 0.0


def terms(events: Sequence[Event], embedding: float) -> Terms:
    """Split the events of one stage into terms; `embedding` is what summing its gradients takes."""
    spent = dict.fromkeys((field.name for field in fields(Terms)), 0.0)
    for event in events:
        took, waited = event.end - event.start, waiting(event, embedding)
        spent["bubble"] += waited
        if event.kind == GRADIENTS:
            spent["gradients"] += took - waited
        elif event.sent is not None:
            spent["messages"] += took - waited
        elif event.kind == "forward-compute":
            spent["forward"] += took
        elif event.kind.startswith("backward") and event.kind.endswith("compute"):
            spent["backward"] += took
        elif event.kind == EMBEDDING:
            spent["embedding"] += took - waited
        elif event.kind == WEIGHTS:
            spent["weights"] += took
            spent["optimizer"] -= took
        elif event.kind == NORM:
            spent["optimizer"] -= took
        elif event.kind == OPTIMIZER:
            spent["optimizer"] += took
    return Terms(**spent)
