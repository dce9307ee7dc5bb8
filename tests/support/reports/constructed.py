"""Runs whose times are given, event by event: what they record is what the engine records, and its causes are known.

Nothing is written and nothing is drawn at random: a plan and its timeline come straight from a `Course`, so that many
cases are cheap, and a case with one thing changed says how long an iteration takes then.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.check import actions_of
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.engine.streams.executor import StreamSteps
from reports.readers.events import EVENT, Timeline, frame

MS = 1_000_000
BEGIN = 5_000 * MS
FORWARD, BACKWARD = (Kind.RECV_FORWARD, Kind.SEND_FORWARD), (Kind.RECV_BACKWARD, Kind.SEND_BACKWARD)


def _one(*_: int) -> float:
    return 1.0


def _nothing(*_: int) -> float:
    return 0.0


def _quick(_sender: int, _receiver: int, _forward: bool, _iteration: int) -> tuple[float, float]:
    return 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run, with times in ms; functions of rank and iteration say what differs."""

    partition: tuple[int, ...]
    """Layers of each virtual stage."""
    replicas: tuple[int, ...] = ()
    """By stage; one each by default."""
    tensor: int = 1
    chunks: int = 1
    schedule: str = "one_f_one_b"
    micro_batches: int = 8
    """Of a replica, or of the whole iteration where stages have unlike numbers of them or nothing is flushed."""
    shares: tuple[int, ...] | None = None
    iterations: int = 5
    ranks_per_node: int = 2
    gpus: tuple[str, ...] = ()
    """By node, from the first; A10 beyond."""
    layer: float = 5.0
    """The forward pass of one; the backward pass takes twice as long."""
    gpu_pace: Callable[[str], float] = lambda gpu: 1 / 3 if gpu == "A100" else 1.0
    embedding: float = 0.5
    """The forward pass of the embedding on the first stage."""
    head: float = 2.0
    """The same of what follows the last layer."""
    pace: Callable[[int, int], float] = _one
    """Of a rank in an iteration: how many times as long its passes take."""
    link: Callable[[int, int, bool, int], tuple[float, float]] = _quick
    """Of sender, receiver, whether forward, iteration: for how long the link is busy with a message, and how long the
    message then still takes."""
    shared_link: bool = False
    """Whether all messages of a node leave by one link."""
    data: Callable[[int, int], float] = lambda rank, iteration: 0.5
    """Of loading the batch of an iteration, by a rank of the first and the last stage."""
    optimizer: Callable[[int, int], float] = lambda rank, iteration: 3.0
    embedding_sum: float = 2.0
    gradients_sum: Callable[[int], float] = lambda stage: 3.0
    tensor_sum: float = 0.3
    """Of a layer, in each direction."""
    overlapped: bool = False
    """Whether gradients are summed beside the last backward pass: the sum of each half of it."""
    host: Callable[[int, int], float] = _nothing
    """Of rank and iteration: what nothing is recorded of, before each pass."""
    between: Callable[[int, int], float] = _nothing
    """What a rank does after an iteration, and nothing is recorded of: all wait for it, as for a checkpoint."""

    save_interval: int | None = None
    eval_interval: int | None = None

    @property
    def stages(self) -> int:
        return len(self.partition) // self.chunks

    @property
    def layout(self) -> Layout:
        return Layout((self.tensor,) * self.stages, self.replicas or (1,) * self.stages)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def gpu(self, rank: int) -> str:
        node = self.node(rank)
        return self.gpus[node] if node < len(self.gpus) else "A10"


def plan_of(course: Course) -> Plan:
    layout, streams = course.layout, course.schedule == "pipedream"
    unlike = not layout.even
    data = max(layout.replicas)
    count = course.micro_batches if streams or unlike else course.micro_batches * data
    if course.shares is not None:
        count = sum(course.shares)
    nodes = range(-(-layout.world_size // course.ranks_per_node))
    places = [layout.stage_dp_tp(rank) for rank in range(layout.world_size)]
    content: dict[str, Any] = {
        "version": 2,
        "run": "constructed/20260101-000000-aaaa",
        "tensor": course.tensor,
        "data": data,
        "pipeline": course.stages,
        "chunks": course.chunks,
        "partition": list(course.partition),
        "recompute": "none",
        "sharded_optimizer": False,
        "sequence_parallel": False,
        "schedule": course.schedule,
        "schedule_file": None,
        "micro_batch_size": 1,
        "global_batch_size": count,
        "nodes": [
            {
                "name": f"n{node}",
                "group": "all",
                "gpu": course.gpu(node * course.ranks_per_node),
                "ranks": [rank for rank in range(layout.world_size) if course.node(rank) == node],
            }
            for node in nodes
        ],
        "ranks": [
            {
                **{"rank": rank, "node": course.node(rank), "local_rank": rank % course.ranks_per_node},
                **{"stage": stage, "dp": dp, "tp": tp, "emulates": None},
            }
            for rank, (stage, dp, tp) in enumerate(places)
        ],
        "model": {
            **{"layers": sum(course.partition), "hidden": 1600, "heads": 16, "sequence_length": 1024},
            **{"vocab_size": 50257, "padded_vocab_size": 50304},
        },
        "train": {
            **{"iterations": course.iterations, "seed": 1, "precision": "fp32", "log_interval": 1},
            **{"checkpoint": course.save_interval is not None, "save_interval": course.save_interval},
            "eval_interval": course.eval_interval,
        },
        "timeline": True,
        "device": "cuda",
    }
    if course.shares is not None:
        content["shares"] = list(course.shares)
    if unlike:
        content["replicas"] = list(layout.replicas)
    if streams:
        content["streaming"] = {"semantics": "stashing", "update_every": 1, "depth": None}
    return Plan.parse(content, Path("/nowhere"))


@dataclass
class _World:
    """What ranks have left for each other; times in ns."""

    sent: dict[tuple[Kind, int, int, int, int, int], int] = field(default_factory=dict)
    """By kind of the receive, sender, receiver, iteration, micro-batch and chunk of the receiver: when it is there."""
    met: dict[tuple[object, ...], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By meeting, when each rank came."""
    busy: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By link, until when."""
    records: list[tuple[int, str, int, int, int, int, int, int]] = field(default_factory=list)


def timeline_of(course: Course, plan: Plan | None = None) -> Timeline:
    """The events of all ranks, on one clock."""
    plan = plan or plan_of(course)
    world = _World()
    waiting = deque(_Rank(course, plan, world, place.rank).run() for place in plan.ranks)
    idle = 0
    while waiting:
        rank = waiting.popleft()
        before = len(world.records)
        for _ in rank:
            waiting.append(rank)
            break
        idle = 0 if len(world.records) > before else idle + 1
        assert idle <= 4 * len(plan.ranks) + 8, "all ranks wait"
    names = sorted({record[1] for record in world.records})
    index = {name: number for number, name in enumerate(names)}
    found = np.zeros(len(world.records), EVENT)
    for row, (rank, name, iteration, micro_batch, chunk, peer, start, end) in zip(found, world.records, strict=True):
        row["rank"], row["name"], row["iteration"], row["micro_batch"] = rank, index[name], iteration, micro_batch
        row["chunk"], row["peer"], row["start_ns"], row["end_ns"] = chunk, peer, start, end
    found = found[np.lexsort((-found["end_ns"], found["start_ns"], found["rank"]))]
    return Timeline(frame(found, names), {}, 0, ())


def period_ms(timeline: Timeline) -> float:
    """How long an iteration takes, of a run that goes on: all but the first two and the last one."""
    ends = timeline.events.groupby("iteration")["end_ns"].max().sort_index().to_numpy()
    return float(ends[-2] - ends[1]) / (len(ends) - 3) / MS


class _Rank:
    def __init__(self, course: Course, plan: Plan, world: _World, rank: int) -> None:
        self._course, self._plan, self._world, self._rank = course, plan, world, rank
        self._place = plan.ranks[rank]
        self._now = BEGIN
        self._iteration = 0
        layout, stage = plan.layout, self._place.stage
        self._data_group = [layout.rank(stage, dp, self._place.tp) for dp in range(layout.replicas[stage])]
        self._tensor_group = [layout.rank(stage, self._place.dp, tp) for tp in range(layout.tensors[stage])]
        self._model_group = next(group for group in layout.model_groups() if rank in group)
        last = layout.stages - 1
        self._tied: list[int] = []
        if last and stage in (0, last):
            self._tied = [one for one in self._model_group if plan.ranks[one].stage in (0, last)]
            self._tied = [one for one in self._tied if plan.ranks[one].tp == self._place.tp]
        self._turn: Counter[str] = Counter()
        self._sums: list[int] = []
        """When each that goes on beside a backward pass began."""

    def run(self) -> Iterator[None]:
        plan, course = self._plan, self._course
        stream = None if plan.stream is None else StreamSteps(plan, self._place, 0)
        for iteration in range(1, course.iterations + 1):
            self._iteration = iteration
            if self._place.stage in (0, course.stages - 1):
                self._spend("batch-generator", course.data(self._rank, iteration))
            if stream is None:
                actions = actions_of(plan, self._place.stage, self._place.dp)
                computes = [number for number, action in enumerate(actions) if not _way(action.kind)]
                for number, action in enumerate(actions):
                    beside = course.overlapped and number == computes[-1]
                    yield from self._act(action.kind, action.micro_batch, action.chunk, beside)
                yield from self._update()
            else:
                stream.begins(iteration)
                for step in stream.of(iteration):
                    if step.kind is Kind.UPDATE:
                        yield from self._sum_gradients()
                        self._spend("optimizer", course.optimizer(self._rank, iteration))
                    else:
                        yield from self._act(step.kind, step.micro_batch, step.chunk)
            if any(course.between(place.rank, iteration) for place in plan.ranks):
                self._now += round(course.between(self._rank, iteration) * MS)
                yield from self._meet("", list(range(plan.world_size)), 0)

    def _act(self, kind: Kind, m: int, chunk: int, beside: bool = False) -> Iterator[None]:
        if _way(kind):
            yield from self._exchange(kind, m, chunk)
            return
        course = self._course
        self._now += round(course.host(self._rank, self._iteration) * MS)
        virtual = chunk * course.stages + self._place.stage
        layers, ends = course.partition[virtual], 0.0
        ends += course.embedding if virtual == 0 else 0.0
        ends += course.head if virtual == len(course.partition) - 1 else 0.0
        times = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(kind, 1.0)
        pace = course.pace(self._rank, self._iteration) * course.gpu_pace(course.gpu(self._rank))
        pace *= times / course.tensor
        start = self._now
        sums = []
        if course.tensor == 1:
            halves = 2 if beside else 1
            for _ in range(halves):
                self._now += round((layers * course.layer + ends) * pace * MS / halves)
                if beside:
                    sums.append(self._now)
                    self._come(("overlapped", len(sums)), self._data_group)
        else:
            self._now += round(ends * pace * MS)
            for _ in range(layers):
                self._now += round(course.layer * pace * MS)
                yield from self._meet("tensor-all-reduce", self._tensor_group, course.tensor_sum, m, chunk)
        self._note(kind.value, start, self._now, m, chunk)
        self._sums += sums

    def _exchange(self, kind: Kind, m: int, chunk: int) -> Iterator[None]:
        course, plan, place = self._course, self._plan, self._place
        layout, stages = plan.layout, course.stages
        forward = kind in FORWARD
        receives = kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
        step = -1 if forward == receives else 1
        there = chunk * stages + place.stage + step
        stage, their_chunk = there % stages, there // stages
        dp = place.dp if layout.even else m % layout.replicas[stage]
        peer = layout.rank(stage, dp, place.tp)
        if receives:
            key = (kind, peer, self._rank, m + 1_000_000 * (0 if plan.stream else self._iteration), chunk, 0)
            while key not in self._world.sent:
                yield
            start = self._now
            self._now = max(start, self._world.sent[key])
            self._note(kind.value, start, self._now, m, chunk, peer)
            return
        takes = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
        key = (takes, self._rank, peer, m + 1_000_000 * (0 if plan.stream else self._iteration), their_chunk, 0)
        occupied, flight = course.link(self._rank, peer, forward, self._iteration)
        link: tuple[object, ...] = (self._rank, forward)
        if course.shared_link and course.node(self._rank) != course.node(peer):
            link = ("node", course.node(self._rank))
        begin = max(self._now, self._world.busy.get(link, 0))
        self._world.busy[link] = begin + round(occupied * MS)
        self._world.sent[key] = begin + round((occupied + flight) * MS)
        self._note(kind.value, self._now, self._now, m, chunk, peer)

    def _update(self) -> Iterator[None]:
        course = self._course
        if course.overlapped:
            yield from self._take_sums()
        else:
            yield from self._sum_gradients()
        if self._tied:
            yield from self._meet("embedding-grads-all-reduce", self._tied, course.embedding_sum)
        start = self._now
        if len(self._model_group) > 1:
            yield from self._meet("grad-norm-all-reduce", self._model_group, 0.1)
        self._now += round(course.optimizer(self._rank, self._iteration) * MS)
        self._note("optimizer", start, self._now)

    def _take_sums(self) -> Iterator[None]:
        """Those that went on beside the last backward pass."""
        group, start, free, sums = self._data_group, self._now, 0, self._sums
        self._sums = []
        if len(group) == 1:
            return
        for number, begun in enumerate(sums, 1):
            while len(came := self._world.met[self._key(("overlapped", number), group)]) < len(group):
                yield
            free = max(free, *came.values()) + round(self._course.gradients_sum(self._place.stage) * MS / len(sums))
            self._note("overlapped-grads-all-reduce", begun, free)
        self._now = max(self._now, free)
        self._note("grads-all-reduce", start, self._now)

    def _sum_gradients(self) -> Iterator[None]:
        if len(self._data_group) > 1:
            yield from self._meet("grads-all-reduce", self._data_group, self._course.gradients_sum(self._place.stage))

    def _key(self, what: object, group: Sequence[int]) -> tuple[object, ...]:
        return (what, tuple(group), self._iteration)

    def _come(self, what: object, group: Sequence[int]) -> dict[int, int]:
        came = self._world.met[self._key(what, group)]
        came[self._rank] = self._now
        return came

    def _meet(self, name: str, group: Sequence[int], takes: float, m: int = -1, chunk: int = 0) -> Iterator[None]:
        self._turn[name] += 1
        start, came = self._now, self._come((name, self._turn[name]), group)
        while len(came) < len(group):
            yield
        self._now = max(came.values()) + round(takes * MS)
        if name:
            self._note(name, start, self._now, m, chunk)

    def _spend(self, name: str, ms: float) -> None:
        start = self._now
        self._now += round(ms * MS)
        self._note(name, start, self._now)

    def _note(self, name: str, start: int, end: int, m: int = -1, chunk: int = 0, peer: int = -1) -> None:
        self._world.records.append((self._rank, name, self._iteration, m, chunk, peer, start, end))


def _way(kind: Kind) -> bool:
    return kind in (*FORWARD, *BACKWARD)
