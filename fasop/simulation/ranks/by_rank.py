"""An iteration of a plan whose stages differ, rank by rank: as `fasop.simulation.ranks.replay`, of all ranks together.

A message to several ranks is one for each of them, which leave one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fasop.errors import SearchError
from fasop.simulation.iteration import EMBEDDING, GRADIENTS, NORM, OPTIMIZER, WEIGHTS
from fasop.simulation.ranks.rank_times import RankDurations
from fasop.simulation.ranks.replay import RECEIVES, SENDS, Event
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.replay import AnyAction
from megatron_ext.contract.schedule.schedules import Actions


class Iteration(NamedTuple):
    """What the ranks of a plan do, and what it takes."""

    seconds: float
    """From the end of one iteration to the end of the next."""
    events: Sequence[Sequence[Event]]
    """By rank, then time."""


def iteration(layout: Layout, actions: Sequence[Sequence[Actions]], ranks: Sequence[RankDurations]) -> Iteration:
    """Of ranks that take the actions of their stage and replica.

    Raises:
        SearchError: the schedule never ends.
    """
    first = min(rank.optimizer for rank in ranks)
    events = Ranks(layout, actions, ranks, first).run()
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
        stage, stepped = layout.stage_dp_tp(rank)[0], known + own.optimizer
        spans = {
            GRADIENTS: (ends[rank], summed[rank]),
            EMBEDDING: (summed[rank], shared[rank]),
            NORM: (shared[rank], known),
            WEIGHTS: (stepped - own.weights, stepped),
            OPTIMIZER: (shared[rank], stepped),
        }
        events[rank] += [
            Event(stage, name, -1, 0, begin, end, last[rank] if name == GRADIENTS and last[rank] > begin else None)
            for name, (begin, end) in spans.items()
            if end > begin or name in (NORM, OPTIMIZER)
        ]
    return Iteration(known + first, events)


def computed_until(events: Sequence[Event]) -> float:
    """When a rank has done its last action of the schedule."""
    return max((event.end for event in events if event.micro_batch >= 0), default=0.0)


class Ranks:
    """All ranks, each of which goes as far as the messages let it, until all have done all."""

    def __init__(
        self,
        layout: Layout,
        actions: Sequence[Sequence[Sequence[AnyAction]]],
        ranks: Sequence[RankDurations],
        first: float,
    ) -> None:
        self._layout, self._ranks = layout, ranks
        self._together = {rank: group for group in layout.data_groups() for rank in group}
        self._places = [layout.stage_dp_tp(rank) for rank in range(layout.world_size)]
        self._actions = [
            [(action.kind.value, action.micro_batch, action.chunk) for action in actions[stage][replica]]
            for stage, replica, _ in self._places
        ]
        self._done = [0] * len(ranks)
        self._now = [rank.optimizer - first for rank in ranks]
        self._events: list[list[Event]] = [[] for _ in ranks]
        self._messages: dict[tuple[str, int, int], deque[tuple[float, float]]] = {}
        """By kind, sender and receiver: when each was sent, and when it is there."""
        self._free: dict[tuple[int, str | None], float] = {}
        """By sender and, where it has two links, the kind of message."""

    def run(self) -> list[list[Event]]:
        ready = deque(range(len(self._ranks)))
        while ready:
            rank = ready.popleft()
            while self._done[rank] < len(self._actions[rank]):
                woken = self._step(rank)
                if woken is None:
                    break
                ready.extend(woken)
        if any(done < len(own) for done, own in zip(self._done, self._actions, strict=True)):
            raise SearchError("the schedule deadlocks: ranks wait for messages that no rank sends")
        return self._events

    def _step(self, rank: int) -> Sequence[int] | None:
        """Does the next action of a rank: the ranks that may go on now; None if it has to wait."""
        kind, m, chunk = self._actions[rank][self._done[rank]]
        if kind == OPTIMIZER:
            return self._update(rank)
        begin, sent, woken = self._now[rank], None, list[int]()
        end = begin
        if kind in RECEIVES:
            send, step = RECEIVES[kind]
            (peer,) = self._peers(rank, step, m, sending=False)
            arrived = self._messages.get((send, peer, rank))
            if not arrived:
                return None
            sent, there = arrived.popleft()
            end = max(begin, there)
        elif kind in SENDS:
            times = self._ranks[rank].times
            takes, busy = times.sends(kind)
            link = rank, None if times.one_way_out or self._layout.stages == 2 else kind
            for peer in self._peers(rank, SENDS[kind], m, sending=True):
                leaves = max(begin, self._free.get(link, 0.0))
                self._free[link] = leaves + busy
                self._messages.setdefault((kind, rank, peer), deque()).append((begin, leaves + takes))
                woken.append(peer)
        else:
            end = begin + self._ranks[rank].times.of(kind, chunk)
        self._events[rank].append(Event(self._places[rank][0], kind, m, chunk, begin, end, sent))
        self._now[rank] = end
        self._done[rank] += 1
        return woken

    def _update(self, rank: int) -> Sequence[int] | None:
        """Of a stream: begins when the last replica has come to it, and is one of all of them."""
        group = self._together[rank]
        if any(
            self._done[other] >= len(self._actions[other])
            or self._actions[other][self._done[other]] != self._actions[rank][self._done[rank]]
            for other in group
        ):
            return None
        latest = max(self._now[other] for other in group)
        for other in group:
            stage, begin, own = self._places[other][0], self._now[other], self._ranks[other]
            summed = latest + own.gradients
            sent = latest if latest > begin else None
            if len(group) > 1:
                self._events[other].append(Event(stage, GRADIENTS, -1, 0, begin, summed, sent))
            self._events[other].append(Event(stage, OPTIMIZER, -1, 0, summed, summed + own.optimizer))
            self._now[other] = summed + own.optimizer
            self._done[other] += 1
        return [other for other in group if other != rank]

    def _peers(self, rank: int, step: int, m: int, *, sending: bool) -> list[int]:
        """Whom a message of a micro-batch comes from, or goes to, so many stages on."""
        layout, (stage, replica, place) = self._layout, self._places[rank]
        other = (stage + step) % layout.stages
        peer = replica if layout.even else m % layout.replicas[other]
        own, theirs = layout.tensors[stage], layout.tensors[other]
        places = range(place, theirs, own) if sending else (place % theirs,)
        return [layout.rank(other, peer, one) for one in places]
