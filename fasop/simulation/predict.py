"""One iteration of one plan, as it is predicted: every event, and where each stage's time goes.

`fasop.search.search` compares many plans by the same costs (`fasop.simulation.on_nodes`); here a single one is
replayed, action by action and with whatever schedule, so that it can be explained, or laid over what was measured.
Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from conf.schema.experiment import Experiment, Parallel
from conf.schema.partition import NodeOrder, Partition
from fasop.costs.calibration import Calibration
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.layers import Basis
from fasop.costs.memory import GIB, StageMemory, chunks_in_flight, stage_memory
from fasop.costs.placement import place
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.simulation.on_nodes import handing_out, pipelines
from fasop.simulation.pipelines import Linear, Pipelines
from fasop.simulation.replay import Event, StageTimes, simulate
from megatron_ext.contract import schedule_check
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.schedules import as_json
from megatron_ext.contract.schedules import schedule as make_schedule

GRADIENTS, EMBEDDING, OPTIMIZER, NORM, WEIGHTS = (
    "grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer",
    "grad-norm-all-reduce",
    "params-all-gather",
)
"""Events after the schedule's, by the names of docs/formats.md; NORM and WEIGHTS lie inside OPTIMIZER."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What the stages take; seconds, by stage."""

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
    def of(cls, lines: Pipelines, handing: Linear, layers: Sequence[int]) -> Taken:
        """By the one pipeline of `lines`; `layers` are by virtual stage."""
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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is predicted of one stage."""

    layers: tuple[int, ...]
    """By chunk."""
    groups: tuple[str, ...]
    """Names of its nodes' groups."""
    gpus: tuple[str, ...]
    """Names of its kinds of GPU."""
    terms: Terms
    times: StageTimes
    """Of one micro-batch."""
    memory: StageMemory[float]
    limit_gib: float
    """Memory of its smallest GPU."""

    @property
    def memory_gib(self) -> float:
        return self.memory.of(sum(self.layers)) / GIB


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One iteration in the middle of a run."""

    iteration_s: float
    """From the end of one iteration to the end of the next."""
    stages: Sequence[Stage]
    events: Sequence[Event]
    """By stage, then time; 0 is when the first stage begins. Those without a micro-batch have -1."""
    basis: Basis
    """The worst of what its times rest on."""
    taken: Taken
    """What it follows from."""
    schedule: Mapping[str, Any]
    """Actions, as in docs/formats.md."""

    @property
    def waiting(self) -> list[float]:
        """Of each event the part in which its stage waits for others."""
        return [waiting(event, self.taken.embedding) for event in self.events]


def predict(
    experiment: Experiment, schedule: Mapping[str, Any] | None = None, calibration: Calibration | None = None
) -> Prediction:
    """Of an experiment, such as a run's frozen configuration (`conf.compose.read_experiment`).

    `schedule` is the content of its `parallel.schedule_file`, if it has one; a run has a copy (`schedule.json`).

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for the tensor size, the schedule is none of the plan's, or the calibration
            is of other nodes.
    """
    training, kinds = planned(experiment)
    return predict_plan(training, kinds if calibration is None else calibration.applied(kinds), schedule)


def planned(experiment: Experiment) -> tuple[Training, Sequence[NodeKind]]:
    """The plan of an experiment, with its partition and its node order, and the nodes that it takes.

    Raises:
        ConfigError: a profile cannot be read.
    """
    counts = dict(zip(experiment.node_order.groups, experiment.ranks_per_node(), strict=True))
    groups = {
        name: replace(experiment.cluster.groups[name], gpus_per_node=gpus) for name, gpus in sorted(counts.items())
    }
    parallel = replace(experiment.parallel, partition=str(experiment.partition), node_order=str(experiment.node_order))
    return replace(Training.of(experiment), parallel=parallel), node_kinds(replace(experiment.cluster, groups=groups))


def predict_plan(
    training: Training, kinds: Sequence[NodeKind], schedule: Mapping[str, Any] | None = None
) -> Prediction:
    """Of the plan `training.parallel`, which has a partition and a node order, on nodes of these kinds.

    Raises:
        SearchError: a profile has no costs for the tensor size, or the schedule is none of the plan's.
    """
    parallel, (order, layers) = training.parallel, _laid(training, kinds)
    taken, basis = what_is_taken(training, kinds)
    if schedule is None:
        lists = make_schedule(str(parallel.schedule), parallel.pipeline, parallel.chunks, parallel.micro_batches)
        schedule = as_json(lists, parallel.chunks, parallel.micro_batches)
    else:
        try:
            schedule_check.parsed(schedule, parallel.pipeline, parallel.chunks, parallel.micro_batches)
        except EngineError as error:
            raise SearchError(f"parallel.schedule_file: {error}") from error
    iteration_s, events = replay(schedule, taken)
    where = place(tuple(kinds[kind].gpus for kind in order), parallel.tensor, parallel.data, parallel.pipeline).stages
    ends = [*where.starts[1:], len(where.nodes)]
    on = [[kinds[order[node]] for node in where.nodes[a:b]] for a, b in zip(where.starts, ends, strict=True)]
    return Prediction(
        iteration_s=iteration_s,
        stages=[
            Stage(
                layers=layers[number :: parallel.pipeline],
                groups=tuple(dict.fromkeys(kind.name for kind in on[number])),
                gpus=tuple(dict.fromkeys(kind.gpu.name for kind in on[number])),
                terms=terms([event for event in events if event.stage == number], taken.embedding),
                times=taken.times[number],
                memory=stage_memory(training, number, _kept(parallel, layers, number)),
                limit_gib=min(kind.gpu.memory_gib for kind in on[number]),
            )
            for number in range(parallel.pipeline)
        ],
        events=events,
        basis=basis,
        taken=taken,
        schedule=schedule,
    )


def what_is_taken(training: Training, kinds: Sequence[NodeKind]) -> tuple[Taken, Basis]:
    """By the stages of the plan `training.parallel`, and the worst of what that rests on.

    Raises:
        SearchError: a profile has no costs for the tensor size.
    """
    order, layers = _laid(training, kinds)
    lines = pipelines(training, kinds, np.array([order]))
    return Taken.of(lines, handing_out(training, kinds, np.array([order])), layers), Basis(int(lines.basis[0]))


def _laid(training: Training, kinds: Sequence[NodeKind]) -> tuple[list[int], tuple[int, ...]]:
    """The kinds of a plan's nodes, in their order, and its layers by virtual stage."""
    parallel = training.parallel
    assert parallel.partition is not None
    assert parallel.node_order is not None
    names = [kind.name for kind in kinds]
    order = [names.index(name) for name in NodeOrder.parse(parallel.node_order).groups]
    return order, Partition.parse(parallel.partition).layers


def _kept(parallel: Parallel, layers: Sequence[int], stage: int) -> float | None:
    """Of how many micro-batches a layer of a stage keeps its activations, the mean; None where it has one chunk."""
    if parallel.chunks == 1:
        return None
    held = chunks_in_flight(parallel.pipeline, parallel.micro_batches, parallel.chunks)[..., stage]
    of_chunks = layers[stage :: parallel.pipeline]
    return float((held @ of_chunks).max()) / max(sum(of_chunks), 1)


def stage_times(lines: Pipelines, layers: Sequence[int]) -> list[StageTimes]:
    """What the stages of the one pipeline take for a micro-batch; `layers` are by virtual stage."""
    stages, column = lines.stages, np.array([layers]).T
    forward, backward = (passes.of(column)[:, 0].tolist() for passes in (lines.forward, lines.backward))
    busy = lines.occupied
    return [
        StageTimes(
            forward=forward[stage::stages],
            backward=backward[stage::stages],
            send_forward=float(lines.hop[stage, 0]),
            send_backward=float(lines.hop[stage - 1, 0]),
            busy_forward=float(busy[stage, 0]),
            busy_backward=float(busy[stage - 1, 0]),
            one_way_out=lines.one_way_out is not None and bool(lines.one_way_out[stage]),
        )
        for stage in range(stages)
    ]


def replay(schedule: Mapping[str, Any], taken: Taken) -> tuple[float, list[Event]]:
    """The length of an iteration, and its events: those of the schedule, and what follows them.

    Every stage sums its gradients, then the first and the last one those of the embedding; once all are done, the norm
    is known to all, and each steps its optimizer and begins the next iteration.

    Raises:
        SearchError: the schedule never ends.
    """
    first = min(taken.optimizer)
    begin = [step - first for step in taken.optimizer]
    computed = simulate(schedule, taken.times, begin, blocking=taken.blocking)
    stages = len(taken.optimizer)
    done = [max(event.end for event in computed if event.stage == stage) for stage in range(stages)]
    summed = [end + takes for end, takes in zip(done, taken.gradients, strict=True)]
    shared = list(summed)
    if stages > 1:
        shared[0] = shared[-1] = max(summed[0], summed[-1]) + taken.embedding
    known = max(shared)
    events = []
    for stage in range(stages):
        events += [event for event in computed if event.stage == stage]
        stepped = known + taken.optimizer[stage]
        spans = {
            GRADIENTS: (done[stage], summed[stage]),
            EMBEDDING: (summed[stage], shared[stage]),
            NORM: (shared[stage], known),
            WEIGHTS: (stepped - taken.weights[stage], stepped),
            OPTIMIZER: (shared[stage], stepped),
        }
        events += [
            Event(stage, name, -1, 0, start, end)
            for name, (start, end) in spans.items()
            if end > start or name in (NORM, OPTIMIZER)
        ]
    return known + first, events


def waiting(event: Event, embedding: float) -> float:
    """The part of an event in which its stage waits for others; `embedding` is what summing its gradients takes."""
    took = event.end - event.start
    if event.sent is not None:
        return max(0.0, event.sent - event.start)
    if event.kind == EMBEDDING:
        return max(0.0, took - embedding)
    return took if event.kind == NORM else 0.0


def terms(events: Sequence[Event], embedding: float) -> Terms:
    """Of the events of one stage; `embedding` is what summing its gradients takes."""
    spent = dict.fromkeys((field.name for field in fields(Terms)), 0.0)
    for event in events:
        took, waited = event.end - event.start, waiting(event, embedding)
        spent["bubble"] += waited
        if event.sent is not None:
            spent["messages"] += took - waited
        elif event.kind == "forward-compute":
            spent["forward"] += took
        elif event.kind.startswith("backward") and event.kind.endswith("compute"):
            spent["backward"] += took
        elif event.kind == GRADIENTS:
            spent["gradients"] += took
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
