"""How long an iteration takes: replays a schedule (docs/formats.md, "Schedules") with given times.

Every stage takes its actions in their order. An action that computes begins when the one before it has ended; a
receive ends when the message is there, which was sent as soon as it was made and takes its transfer time; sends are
asynchronous and take no time of the sender. So the times follow from the longest path, action by action.
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
    """From the end of a forward pass until the following stage has its result."""
    send_backward: float

    def of(self, kind: str, chunk: int) -> float:
        """The duration of an action that computes. The parts of a split backward pass take half of it each."""
        if kind == "forward-compute":
            return self.forward[chunk]
        return self.backward[chunk] * (1.0 if kind == "backward-compute" else 0.5)


def rehearsed_times(plan: Mapping[str, Any]) -> list[StageTimes]:
    """Nanoseconds by stage, from the plan.json of a rehearsal; of the replicas the first stands for all."""
    ranks = {rank["stage"]: rank["rank"] for rank in plan["ranks"] if rank["dp"] == rank["tp"] == 0}
    told = [plan["rehearsal"]["ranks"][ranks[stage]] for stage in range(plan["pipeline"])]
    return [
        StageTimes(
            forward=one["forward_ns"],
            backward=one["backward_ns"],
            send_forward=one["send_forward_ns"],
            send_backward=one["send_backward_ns"],
        )
        for one in told
    ]


@dataclass(frozen=True)
class Event:
    """One action, as it came out."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


RECEIVES = {"forward-recv": ("forward-send", -1), "backward-recv": ("backward-send", 1)}
"""The send that each receive takes its message from, and by how many stages away it is."""


def simulate(
    schedule: Mapping[str, Any], times: Sequence[StageTimes], begin: Sequence[float] | None = None
) -> list[Event]:
    """The events of one iteration, stage after stage; `times` and `begin`, when each begins (0), are by stage.

    Raises:
        SearchError: the stages wait for each other for ever.
    """
    actions: Sequence[Sequence[Sequence[Any]]] = schedule["actions"]
    stages = len(actions)
    begins = [0.0] * stages if begin is None else begin
    events: list[list[Event]] = [[] for _ in actions]
    messages: dict[tuple[str, int], deque[float]] = {}
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        done = events[stage]
        now = done[-1].end if done else begins[stage]
        for kind, m, chunk in actions[stage][len(done) :]:
            start = now
            if kind in RECEIVES:
                send, step = RECEIVES[kind]
                arrived = messages.get((send, (stage + step) % stages))
                if not arrived:
                    break
                now = max(now, arrived.popleft())
            elif kind in ("forward-send", "backward-send"):
                takes = times[stage].send_forward if kind == "forward-send" else times[stage].send_backward
                messages.setdefault((kind, stage), deque()).append(now + takes)
                ready.append((stage + (1 if kind == "forward-send" else -1)) % stages)
            else:
                now += times[stage].of(kind, chunk)
            done.append(Event(stage, kind, m, chunk, start, now))
    if any(len(done) < len(wanted) for done, wanted in zip(events, actions, strict=True)):
        waiting = [stage for stage in range(stages) if len(events[stage]) < len(actions[stage])]
        raise SearchError(f"the schedule never ends: the stages {waiting} wait for messages that nobody sends")
    return [event for done in events for event in done]


def pipeline_time(events: Sequence[Event]) -> float:
    """From the start of the iteration to the end of its last action."""
    return max(event.end for event in events)
