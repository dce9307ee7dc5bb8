"""Interleaved 1F1B as Megatron-Core runs it, for many pipelines at once: a message waits for both its ends.

A stage starts to send after a pass, and to receive what its next pass needs. It goes on at once, and waits for what it
receives before that next pass, for what it sends after it. While it only does forward passes, and while it only does
backward passes, it waits for both right away. So a stage that is busy holds up those that send to it. From a stage
to one of its neighbours, one message goes over at a time.

Sources: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.13 to 0.16, with `overlap_p2p_comm`; NCCL
and gloo, which send nothing before the receiver takes it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.simulation.vectorised import Longest, Times, last_of

COLUMNS = 512
"""Pipelines that are simulated together, by which the memory for their messages stays small."""


class Do(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    SEND = 2
    """Start to send."""
    RECEIVE = 3
    GO_OVER = 4
    """Done by no stage: a message goes over."""
    WAIT_SENT = 5
    WAIT_RECEIVED = 6


class Message(NamedTuple):
    """Activations or their gradient, between two virtual stages."""

    way: int
    """0: activations, 1: gradients."""
    sender: int
    """The virtual stage."""
    micro_batch: int


class Operation(NamedTuple):
    do: Do
    of: Any
    """A message; of a pass the micro-batch and the chunk."""


class Step(NamedTuple):
    """Operations that can be done at once; arrays with a number for each of them."""

    do: Do
    stages: Integers
    """Those that do them; where messages go over, rows of their links: forward by sender, then backward."""
    of: Integers
    """Numbers of messages, or of parts."""
    before: Integers
    """Where messages go over, those that their senders sent the same way before, or else one that is there from the
    beginning."""


@dataclass
class _Stage:
    """What a stage does, in its order."""

    stage: int
    stages: int
    chunks: int
    micro_batches: int
    done: list[Operation] = field(default_factory=list)
    receiving: dict[int, deque[Message]] = field(default_factory=lambda: {0: deque(), 1: deque()})
    sending: dict[int, Message | None] = field(default_factory=lambda: {0: None, 1: None})

    def operations(self) -> list[Operation]:
        count = self.micro_batches * self.chunks
        ahead = min(count, (self.stages - self.stage - 1) * 2 + (self.chunks - 1) * self.stages)
        self._receive(0, -1)
        self._wait_all(0)
        for k in range(ahead):
            self._pass(0, k)
            self._start(0, k, receives=True)
            self._wait_all(0)
        self._receive(1, -1)
        if ahead == count:
            self._wait_all(1)
        for k in range(count - ahead):
            for way, number, more in ((0, k + ahead, k < count - ahead - 1), (1, k, True)):
                if self.receiving[way]:
                    self._wait_received(way)
                self._pass(way, number)
                before = self.sending[way]
                self.sending[way] = None
                self._start(way, number, receives=more)
                if before is not None:
                    self.done.append(Operation(Do.WAIT_SENT, before))
        left, self.sending = self.sending, {0: None, 1: None}
        for k in range(count - ahead, count):
            if self.receiving[1]:
                self._wait_received(1)
            self._pass(1, k)
            self._start(1, k, receives=True)
            self._wait_all(1)
        self.done += [Operation(Do.WAIT_SENT, message) for way in (1, 0) if (message := left[way]) is not None]
        return self.done

    def _at(self, way: int, k: int) -> tuple[int, int]:
        """Return micro-batch and chunk of a stage's pass."""
        group, place = divmod(k, self.stages * self.chunks)
        chunk, m = divmod(place, self.stages)
        return group * self.stages + m, self.chunks - 1 - chunk if way else chunk

    def _pass(self, way: int, k: int) -> None:
        self.done.append(Operation(Do(way), self._at(way, k)))

    def _start(self, way: int, k: int, receives: bool) -> None:
        """Start to send what pass `k` made, and to receive what the next one needs."""
        m, chunk = self._at(way, k)
        virtual = chunk * self.stages + self.stage
        if virtual != (0 if way else self.stages * self.chunks - 1):
            self.sending[way] = Message(way, virtual, m)
            self.done.append(Operation(Do.SEND, self.sending[way]))
        if receives:
            self._receive(way, k)

    def _receive(self, way: int, k: int) -> None:
        """Start to receive what pass `k` + 1 needs."""
        if k + 1 >= self.micro_batches * self.chunks:
            return
        m, chunk = self._at(way, k + 1)
        sender = chunk * self.stages + self.stage + (1 if way else -1)
        if 0 <= sender < self.stages * self.chunks:
            self.receiving[way].append(Message(way, sender, m))
            self.done.append(Operation(Do.RECEIVE, self.receiving[way][-1]))

    def _wait_received(self, way: int) -> None:
        self.done.append(Operation(Do.WAIT_RECEIVED, self.receiving[way].popleft()))

    def _wait_all(self, way: int) -> None:
        while self.receiving[way]:
            self._wait_received(way)
        sending, self.sending[way] = self.sending[way], None
        if sending is not None:
            self.done.append(Operation(Do.WAIT_SENT, sending))


@lru_cache(maxsize=1024)
def operations(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Operation, ...], ...]:
    """What each stage does in an iteration, in its order.

    A last group of fewer micro-batches than stages is made whole, and what belongs to none of them is left out, as in
    `megatron_ext.contract.schedule.schedules.Interleaved`.
    """
    whole = -(-micro_batches // stages) * stages
    lists = (_Stage(stage, stages, chunks, whole).operations() for stage in range(stages))
    return tuple(tuple(one for one in own if _micro_batch(one) < micro_batches) for own in lists)


def _micro_batch(one: Operation) -> int:
    return int(one.of[0] if one.do < Do.SEND else one.of.micro_batch)


@lru_cache(maxsize=1024)
def _steps(stages: int, chunks: int, micro_batches: int) -> tuple[list[Step], dict[Message, int]]:
    """Everything of an iteration, as many operations of a kind at once as are ready, and a number for each message."""
    lists = operations(stages, chunks, micro_batches)
    messages = [one.of for own in lists for one in own if one.do is Do.SEND]
    numbers = {message: number for number, message in enumerate(messages)}
    left = [deque(own) for own in lists]
    queues = defaultdict[int, deque[Message]](deque)
    """Messages that have not gone over, in their order, by way and sender."""
    for message in messages:
        queues[message.way * stages + message.sender % stages].append(message)
    before = dict.fromkeys(queues, len(messages))
    came: defaultdict[Message, int] = defaultdict(int)
    over: set[Message] = set()
    steps: list[Step] = []
    while any(left):
        for do in Do:
            rows = []
            if do is Do.GO_OVER:
                for link in [link for link, queue in queues.items() if queue and came[queue[0]] == 2]:
                    message = queues[link].popleft()
                    over.add(message)
                    rows.append((link, numbers[message], before[link]))
                    before[link] = numbers[message]
            for stage in [stage for stage, own in enumerate(left) if own and own[0].do is do]:
                of = left[stage][0].of
                if do < Do.SEND:
                    rows.append((stage, of[1] * stages + stage, 0))
                elif do < Do.GO_OVER or of in over:
                    came[of] += do < Do.GO_OVER
                    rows.append((stage, numbers[of], 0))
                else:
                    continue
                left[stage].popleft()
            if rows:
                steps.append(Step(do, *np.array(rows).T))
    return steps, numbers


class _Run:
    """An iteration of pipelines [stages, pipelines] that have one schedule."""

    def __init__(self, micro_batches: int, times: Times) -> None:
        self.times = times
        self.now = times.start.copy()
        stages, columns = self.now.shape
        self.steps, self.numbers = _steps(stages, len(times.forward) // stages, micro_batches)
        self.came = np.zeros((2, len(self.numbers), columns))
        """When sender and receiver came, by message."""
        self.over = np.zeros((len(self.numbers) + 1, columns))
        """When messages were there; the last one is before all."""

    def ends(self, waited: list[Any] | None = None) -> Floats:
        """When stages have done all. Appends of each step what its operations waited for longest."""
        passes = self.times.forward, self.times.backward
        sends = np.concatenate([self.times.send_forward, self.times.send_backward])
        now, came, over = self.now, self.came, self.over
        for do, stages, of, before in self.steps:
            why: Any = None
            if do < Do.SEND:
                now[stages] += passes[do][of]
            elif do < Do.GO_OVER:
                came[do - Do.SEND, of] = now[stages]
            elif do is Do.GO_OVER:
                begin = np.maximum(came[0, of], came[1, of])
                if waited is not None:
                    why = np.where(over[before] > begin, 2, came[1, of] > came[0, of])
                over[of] = np.maximum(begin, over[before]) + sends[stages]
            else:
                own, there = now[stages], over[of]
                if waited is not None:
                    why = there > own
                now[stages] = np.maximum(own, there)
            if waited is not None:
                waited.append(why)
        return now

    def longest(self, after: Floats) -> Longest:
        """Why the iteration takes so long, if `after` comes after each stage's last operation."""
        waited: list[Any] = []
        now = self.ends(waited) + after
        end = last_of(now)
        here, passes = end.copy(), np.zeros((2, *self.times.forward.shape))
        came, over = np.zeros_like(self.came), np.zeros_like(self.over)
        for (do, stages, of, before), why in zip(reversed(self.steps), reversed(waited), strict=True):
            if do < Do.SEND:
                passes[do, of] += here[stages]
            elif do < Do.GO_OVER:
                here[stages] += came[do - Do.SEND, of]
            elif do is Do.GO_OVER:
                path = over[of]
                came[0, of] += np.where(why == 0, path, 0)
                came[1, of] += np.where(why == 1, path, 0)
                over[before] += np.where(why == 2, path, 0)
            else:
                path = here[stages]
                over[of] += np.where(why, path, 0)
                here[stages] = np.where(why, 0, path)
        return Longest(forward=passes[0], backward=passes[1], start=here, end=end, total=now.max(axis=0))


def ends(micro_batches: int, times: Times) -> Floats:
    """[stages, pipelines]: when each stage has done its last operation."""
    return np.concatenate([_Run(micro_batches, some).ends() for some, _ in _parts(times)], axis=1)


def longest(micro_batches: int, times: Times, after: Floats) -> Longest:
    """Why the iteration takes so long, if `after` [stages, pipelines] comes after each stage's last operation."""
    found = [_Run(micro_batches, some).longest(after[:, where]) for some, where in _parts(times)]
    counted = (name for name in Longest._fields if name != "messages")
    return Longest(**{name: np.concatenate([getattr(one, name) for one in found], axis=-1) for name in counted})


def _parts(times: Times) -> Iterator[tuple[Times, slice]]:
    columns = times.start.shape[1]
    whole = Times(*(np.broadcast_to(one, (len(one), columns)) for one in times))
    for begin in range(0, max(columns, 1), COLUMNS):
        where = slice(begin, begin + COLUMNS)
        yield Times(*(one[:, where] for one in whole)), where


class Event(NamedTuple):
    """A pass, or a stage's wait for a message."""

    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float
    begun: float | None
    """When the message began to go over."""


def events(micro_batches: int, times: Times) -> list[list[Event]]:
    """The events of each stage of one pipeline, in their order."""
    run = _Run(micro_batches, times)
    run.ends()
    stages = len(times.start)
    chunks = len(times.forward) // stages
    sends = times.send_forward, times.send_backward
    found = []
    for stage, own in enumerate(operations(stages, chunks, micro_batches)):
        now, of_stage = float(times.start[stage, 0]), list[Event]()
        for do, of in own:
            begin, begun = now, None
            if do < Do.SEND:
                kind, (m, chunk) = ("forward-compute", "backward-compute")[do], of
                now += float((times.forward, times.backward)[do][chunk * stages + stage, 0])
            elif do < Do.GO_OVER:
                continue
            else:
                there = float(run.over[run.numbers[of], 0])
                begun = there - float(sends[of.way][of.sender % stages, 0])
                now = max(now, there)
                sent = do is Do.WAIT_SENT
                kind = f"{('forward', 'backward')[of.way]}-{'send' if sent else 'recv'}"
                m, chunk = of.micro_batch, (of.sender + (0 if sent else (-1 if of.way else 1))) // stages
            of_stage.append(Event(kind, m, chunk, begin, now, begun))
        found.append(of_stage)
    return found
