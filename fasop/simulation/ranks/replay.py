"""How long an iteration takes: replays a schedule (docs/formats.md, "Schedules") with given times.

Every stage takes its actions in their order. An action that computes begins when the one before it has ended. A send
takes no time of the sender: its message waits until the link has sent the one before, then occupies the link for as
long as its bytes take, and is there after the latency. A receive ends when the message is there. So the times follow
from the longest path, action by action. Links send in both directions at once.

Ranks are those of a layout; `simulate` has one a stage.

Megatron-LM's 1F1B (`blocking`) has no messages under way: who sends and who receives wait for each other, and for the
whole transfer. Its interleaved stages wait as in `fasop.simulation.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasop.errors import SearchError
from fasop.simulation import rendezvous
from fasop.simulation.vectorised import Times
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.replay import RECEIVES, SENDS, Replay
from megatron_ext.contract.schedule.schedules import PARTS

_OF_BACKWARD = {kind.value: part for kind, part in PARTS.items()}


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What a stage takes for one micro-batch; any unit, the same everywhere. Sequences are by chunk."""

    forward: Sequence[float]
    backward: Sequence[float]
    send_forward: float
    """From the moment at which the link is free for a forward pass's result until the following stage has it."""
    send_backward: float
    busy_forward: float | None = None
    """For how much of this the link is occupied; None: all of it."""
    busy_backward: float | None = None
    one_way_out: bool = False
    """Whether messages to the following stage and to the one before leave by the same link, as they do wherever the two
    are one stage."""

    def sends(self, kind: str) -> tuple[float, float]:
        """What a message of a send takes, and for how long it occupies its link."""
        forward = kind == "forward-send"
        takes = self.send_forward if forward else self.send_backward
        busy = self.busy_forward if forward else self.busy_backward
        return takes, takes if busy is None else busy

    def of(self, kind: str, chunk: int) -> float:
        """The duration of an action that computes."""
        part = _OF_BACKWARD.get(kind)
        return self.forward[chunk] if part is None else part * self.backward[chunk]


@dataclass(frozen=True, kw_only=True)
class RankDurations:
    """What a rank takes; seconds. What ranks do together takes all of them the same."""

    times: StageTimes
    gradients: float
    embedding: float
    optimizer: float
    """The step and, with a sharded optimizer, handing out its results."""
    weights: float
    """Handing them out alone."""


@dataclass(frozen=True)
class Event:
    """One action, as it came out."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float
    sent: float | None = None
    """For a receive, or a send that blocks: when the message went under way, or began to wait for its link. For a sum
    over the replicas: when the last of them came to it, if that is later."""


EXCHANGES = (["forward-send", "backward-recv"], ["backward-send", "forward-recv"])
"""What Megatron-LM's 1F1B does at once with one neighbour."""


def simulate(
    schedule: Mapping[str, Any],
    times: Sequence[StageTimes],
    begin: Sequence[float] | None = None,
    *,
    blocking: bool = False,
) -> list[Event]:
    """The events of one iteration, stage after stage; `times` and `begin`, when each begins (0), are by stage. Raises
    SearchError: the stages wait for each other for ever."""
    actions = schedule["actions"]
    begins = begin or [0.0] * len(actions)
    if blocking and schedule["chunks"] > 1:
        every = rendezvous.events(schedule["micro_batches"], as_arrays(times, begins))
        return [Event(stage, *one) for stage, own in enumerate(every) for one in own]
    one_each = (1,) * len(actions)
    replay = (_Blocking if blocking else TimedReplay)(Layout(one_each, one_each), actions, times, begins)
    return [event for events in replay.run() for event in events]


def as_arrays(times: Sequence[StageTimes], begins: Sequence[float]) -> Times:
    """The same of one pipeline."""
    columns = (
        [one.forward[chunk] for chunk in range(len(times[0].forward)) for one in times],
        [one.backward[chunk] for chunk in range(len(times[0].forward)) for one in times],
        [one.send_forward for one in times],
        [one.send_backward for one in times],
        begins,
    )
    return Times(*(np.array([column], float).T for column in columns))


class TimedReplay(Replay):
    """Ranks with the time that each has come to; messages leave one after another."""

    def __init__(
        self,
        layout: Layout,
        actions: Sequence[Sequence[Sequence[Any]]],
        times: Sequence[StageTimes],
        begins: Sequence[float],
    ) -> None:
        """`actions`, `times` and `begins` are by rank."""
        super().__init__(layout, actions)
        self.times, self.now = times, list(begins)
        self.events: list[list[Event]] = [[] for _ in actions]
        self._free: dict[tuple[int, str | None], float] = {}
        """When links have sent all that they were given: by sender, and where it has two by the kind of message."""

    def run(self) -> list[list[Event]]:
        """The events by rank. Raises SearchError: ranks wait for each other for ever."""
        waiting = sorted({self.places[rank][0] for rank in self.go_on()})
        if waiting:
            raise SearchError(f"the schedule deadlocks: the stages {waiting} wait for messages that no stage sends")
        return self.events

    def receive(self, rank: int, action: Sequence[Any], message: tuple[float, float]) -> None:
        sent, there = message
        self.done(rank, action, max(self.now[rank], there), sent)

    def send(self, rank: int, action: Sequence[Any]) -> tuple[float, float]:
        """When the message was sent, and when it is there."""
        times = self.times[rank]
        takes, busy = times.sends(action[0])
        link = rank, None if times.one_way_out or self.layout.stages == 2 else action[0]
        begin = max(self.now[rank], self._free.get(link, 0.0))
        self._free[link] = begin + busy
        return self.now[rank], begin + takes

    def sent(self, rank: int, action: Sequence[Any]) -> None:
        self.done(rank, action, self.now[rank])

    def compute(self, rank: int, action: Sequence[Any]) -> None:
        kind, _, chunk = action
        self.done(rank, action, self.now[rank] + self.times[rank].of(kind, chunk))

    def done(self, rank: int, action: Sequence[Any], end: float, sent: float | None = None) -> None:
        """Notes an action that ends then."""
        kind, m, chunk = action
        self.events[rank].append(Event(self.places[rank][0], kind, m, chunk, self.now[rank], end, sent))
        self.now[rank] = end


class _Blocking(TimedReplay):
    """A message is a meeting of its two stages, and so are two that they exchange: both go on when it is there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._waits: dict[tuple[int, int], int] = {}
        """For two stages, which of them is there already."""

    def step(self, stage: int) -> bool:
        mine = self._coming(stage)
        if mine[0] not in SENDS and mine[0] not in RECEIVES:
            return super().step(stage)
        other = stage + (SENDS[mine[0]] if mine[0] in SENDS else RECEIVES[mine[0]][1])
        link = min(stage, other), max(stage, other)
        if self._waits.setdefault(link, stage) == stage:
            return False
        theirs = self._coming(other)
        count = 2 if mine in EXCHANGES and theirs in EXCHANGES else 1
        sends = [
            (here, kind) for here, kinds in ((stage, mine), (other, theirs)) for kind in kinds[:count] if kind in SENDS
        ]
        if len(sends) != count:
            return False  # both send, or both receive, for ever
        del self._waits[link]
        begin = max(self.now[stage], self.now[other])
        end = max(begin + self.times[here].sends(kind)[0] for here, kind in sends)
        for here in (stage, other):
            for left in range(count - 1, -1, -1):
                action = self.actions[here][self.taken[here]]
                if left:  # both end with the exchange
                    self.done(here, action, self.now[here])
                else:
                    self.done(here, action, end, begin)
                self.taken[here] += 1
        self.ready.append(other)
        return True

    def _coming(self, stage: int) -> list[str]:
        """The kinds of a stage's next two actions."""
        begin = self.taken[stage]
        return [kind for kind, _, _ in self.actions[stage][begin : begin + 2]]
