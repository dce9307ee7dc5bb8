"""How long an iteration takes: replays a schedule (docs/formats.md, "Schedules") with given times.

Every stage takes its actions in their order. An action that computes begins when the one before it has ended. A send
takes no time of the sender: its message waits until the link has sent the one before, then occupies the link for as
long as its bytes take, and is there after the latency. A receive ends when the message is there. So the times follow
from the longest path, action by action. Links send in both directions at once.

Megatron-LM's 1F1B (`blocking`) has no messages under way: who sends and who receives wait for each other, and for the
whole transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasop.errors import SearchError


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
        """The duration of an action that computes. The parts of a split backward pass take half of it each."""
        if kind == "forward-compute":
            return self.forward[chunk]
        return self.backward[chunk] * (1.0 if kind == "backward-compute" else 0.5)


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
    """Of a receive, or of a send that blocks: when the message went under way, or began to wait for its link. Of a sum
    over the replicas: when the last of them came to it, if that is later."""


RECEIVES = {"forward-recv": ("forward-send", -1), "backward-recv": ("backward-send", 1)}
"""The send that each receive takes its message from, and by how many stages away it is."""
SENDS = {"forward-send": 1, "backward-send": -1}
"""By how many stages away the receiver is."""
EXCHANGES = (["forward-send", "backward-recv"], ["backward-send", "forward-recv"])
"""What Megatron-LM's 1F1B does at once with one neighbour."""


def simulate(
    schedule: Mapping[str, Any],
    times: Sequence[StageTimes],
    begin: Sequence[float] | None = None,
    *,
    blocking: bool = False,
) -> list[Event]:
    """The events of one iteration, stage after stage; `times` and `begin`, when each begins (0), are by stage.

    Raises:
        SearchError: the stages wait for each other for ever.
    """
    begins = [0.0] * len(schedule["actions"]) if begin is None else begin
    return (_Blocking if blocking else _Replay)(schedule["actions"], times, begins).run()


class _Replay:
    """Stages that go as far as the messages let them, until all have done all."""

    def __init__(
        self, actions: Sequence[Sequence[Sequence[Any]]], times: Sequence[StageTimes], begins: Sequence[float]
    ) -> None:
        self.actions = actions
        self.times = times
        self.now = list(begins)
        self.events: list[list[Event]] = [[] for _ in actions]
        self.ready = deque(range(len(actions)))
        self._messages: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        """By kind and sender: when each was sent, and when it is there."""
        self._free: dict[tuple[int, object], float] = {}
        """When links have sent all that they were given: by sender, and where it has two by the kind of message."""

    def run(self) -> list[Event]:
        while self.ready:
            stage = self.ready.popleft()
            while len(self.events[stage]) < len(self.actions[stage]) and self.step(stage):
                pass
        stages = range(len(self.actions))
        waiting = [stage for stage in stages if len(self.events[stage]) < len(self.actions[stage])]
        if waiting:
            raise SearchError(f"the schedule deadlocks: the stages {waiting} wait for messages that no stage sends")
        return [event for done in self.events for event in done]

    def step(self, stage: int) -> bool:
        """Does the next action of a stage; false if it has to wait."""
        kind, m, chunk = self.actions[stage][len(self.events[stage])]
        if kind in RECEIVES:
            send, step = RECEIVES[kind]
            arrived = self._messages.get((send, (stage + step) % len(self.actions)))
            if not arrived:
                return False
            sent, there = arrived.popleft()
            self.done(stage, kind, m, chunk, max(self.now[stage], there), sent)
        elif kind in SENDS:
            self._messages.setdefault((kind, stage), deque()).append((self.now[stage], self._send(stage, kind)))
            self.ready.append((stage + SENDS[kind]) % len(self.actions))
            self.done(stage, kind, m, chunk, self.now[stage])
        else:
            self.done(stage, kind, m, chunk, self.now[stage] + self.times[stage].of(kind, chunk))
        return True

    def done(self, stage: int, kind: str, m: int, chunk: int, end: float, sent: float | None = None) -> None:
        self.events[stage].append(Event(stage, kind, m, chunk, self.now[stage], end, sent))
        self.now[stage] = end

    def _send(self, stage: int, kind: str) -> float:
        """When the message is there."""
        times = self.times[stage]
        takes, busy = times.sends(kind)
        link = stage, None if times.one_way_out or len(self.actions) == 2 else kind
        begin = max(self.now[stage], self._free.get(link, 0.0))
        self._free[link] = begin + busy
        return begin + takes


class _Blocking(_Replay):
    """A message is a meeting of its two stages, and so are two that they exchange: both go on when it is there."""

    def __init__(
        self, actions: Sequence[Sequence[Sequence[Any]]], times: Sequence[StageTimes], begins: Sequence[float]
    ) -> None:
        super().__init__(actions, times, begins)
        self._waits: dict[tuple[int, int], int] = {}
        """By the two stages: which of them is there already."""

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
                kind, m, chunk = self.actions[here][len(self.events[here])]
                if left:  # both end with the exchange
                    self.done(here, kind, m, chunk, self.now[here])
                else:
                    self.done(here, kind, m, chunk, end, begin)
        self.ready.append(other)
        return True

    def _coming(self, stage: int) -> list[str]:
        """The kinds of a stage's next two actions."""
        begin = len(self.events[stage])
        return [kind for kind, _, _ in self.actions[stage][begin : begin + 2]]
