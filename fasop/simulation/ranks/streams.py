"""What an iteration takes where micro-batches stream through the stages (megatron_ext/contract/schedule/streams.py).

A stream is replayed until it runs evenly; an iteration is a global batch of it, in which nothing waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fasop.errors import SearchError
from fasop.simulation.iteration import GRADIENTS, OPTIMIZER
from fasop.simulation.ranks.replay import Event, RankDurations, TimedReplay
from megatron_ext.contract.layout import Layout, lcm
from megatron_ext.contract.schedule.schedules import Actions, Kind
from megatron_ext.contract.schedule.streams import Stream, StreamAction, end_of

WARMING, MEASURED = 4, 4
"""Rounds of all replicas and whole iterations, before it runs evenly and over which it is measured."""


class StreamIteration(NamedTuple):
    """One in the middle of a run."""

    seconds: float
    events: Sequence[Sequence[Event]]
    """Events of each rank in the order of time; 0 is when the first of them begins. Those of micro-batches belong to
    one iteration."""
    passes: Sequence[Actions]
    """For each rank, the actions whose passes these are, numbered from 0."""


def stream_iteration(
    layout: Layout, stream: Stream, micro_batches: int, ranks: Sequence[RankDurations]
) -> StreamIteration:
    """Simulate a stream of so many micro-batches in an iteration. Raises SearchError: the stream never ends."""
    whole = lcm([micro_batches, stream.period])
    begin = -(-stream.in_flight // whole) * whole + WARMING * whole
    end = begin + MEASURED * whole
    count = end + stream.in_flight + whole
    places = [layout.stage_dp_tp(rank) for rank in range(layout.world_size)]
    by_replica = {
        (stage, dp): list(stream.steps(stage, dp, count))
        for stage, replicas in enumerate(layout.replicas)
        for dp in range(replicas)
    }
    every = _StreamReplay(layout, [by_replica[place[:2]] for place in places], ranks).run()
    last = len(every) - 1

    def learned(until: int) -> float:
        """When the last rank, which writes the log, has learned from so many micro-batches."""
        steps = by_replica[places[last][:2]]
        updates = sum(step.kind is Kind.UPDATE for step in steps[: end_of(steps, until)])
        return [event.end for event in every[last] if event.kind == Kind.UPDATE.value][updates - 1]

    seconds = (learned(end) - learned(begin)) / (MEASURED * whole / micro_batches)
    if not seconds > 0:
        raise SearchError("a stream takes no time")
    own = range(begin, begin + micro_batches)
    shown = [_of_iteration(events, own) for events in every]
    start = min(event.start for events in shown for event in events)
    return StreamIteration(
        seconds,
        [
            [
                replace(
                    event,
                    micro_batch=event.micro_batch - begin if event.micro_batch >= 0 else -1,
                    start=event.start - start,
                    end=event.end - start,
                    sent=None if event.sent is None else event.sent - start,
                )
                for event in events
            ]
            for events in shown
        ],
        [_passes(by_replica[place[:2]], own) for place in places],
    )


class _StreamReplay(TimedReplay):
    """Ranks that update their weights while micro-batches stream."""

    def __init__(self, layout: Layout, steps: Sequence[Sequence[StreamAction]], ranks: Sequence[RankDurations]) -> None:
        first = min(rank.optimizer for rank in ranks)
        actions = [[(one.kind.value, one.micro_batch, one.chunk) for one in own] for own in steps]
        super().__init__(layout, actions, [rank.times for rank in ranks], [rank.optimizer - first for rank in ranks])
        self._ranks = ranks

    def update(self, group: Sequence[int]) -> None:
        """Begins when the last replica has come to it, and is one of all of them."""
        latest = max(self.now[rank] for rank in group)
        for rank in group:
            begin, own = self.now[rank], self._ranks[rank]
            if len(group) > 1:
                sent = latest if latest > begin else None
                self.done(rank, (GRADIENTS, -1, 0), latest + own.gradients, sent)
            self.now[rank] = latest + own.gradients
            self.done(rank, (OPTIMIZER, -1, 0), self.now[rank] + own.optimizer)


def _of_iteration(events: Sequence[Event], own: range) -> list[Event]:
    """A rank's events of these micro-batches, and updates between the first and the last of them."""
    at = [number for number, event in enumerate(events) if event.micro_batch in own]
    between = events[at[0] : at[-1] + 1] if at else ()
    return [event for event in between if event.micro_batch in own or event.micro_batch < 0]


def _passes(steps: Sequence[StreamAction], own: range) -> Actions:
    return [
        step.action._replace(micro_batch=step.micro_batch - own.start)
        for step in steps
        if step.micro_batch in own and step.kind is not Kind.UPDATE
    ]
