"""One iteration of one plan, as it is predicted: every event, and where each stage's time goes.

`fasop.search.search` compares many plans by the same costs (`fasop.simulation.on_nodes`); here a single one is
replayed, action by action and with whatever schedule, so that it can be explained, or laid over what was measured.
Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.schema.values import links, topology
from fasop.costs.calibration import Calibration
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.known_blocks import with_known_blocks
from fasop.costs.layers import Basis
from fasop.costs.memory.allowance import with_allowance
from fasop.costs.memory.amounts import GIB, StageMemory, memory_of_streams
from fasop.costs.network.placement import place
from fasop.costs.training import PlacedTraining, Training
from fasop.errors import SearchError
from fasop.simulation.islands import by_island
from fasop.simulation.iteration import (
    GRADIENTS,
    NORM,
    Durations,
    Iteration,
    Pipeline,
    Terms,
    computed_until,
    iteration,
    replay_together,
    terms,
    waiting,
)
from fasop.simulation.loaded import Parts
from fasop.simulation.memory_of_stages import HeldOnKind, held_on_kinds, memory_of
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, actions_of
from fasop.simulation.ranks.replay import Event, StageTimes
from fasop.simulation.ranks.replicas import Replicas
from fasop.simulation.ranks.streams import StreamIteration, stream_iteration
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.layout import stage_name
from megatron_ext.contract.schedule import check as schedule_check
from megatron_ext.contract.schedule.iteration import as_json

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is predicted of one stage."""

    name: str
    """Its number, and its island where these have plans of their own."""
    layers: tuple[int, ...]
    """Layers of each chunk."""
    holds: tuple[str, ...]
    """What each chunk has, in words: its layers, by kind where there are several."""
    groups: tuple[str, ...]
    """Names of its nodes' groups."""
    gpus: tuple[str, ...]
    """Names of its kinds of GPU."""
    terms: Terms
    times: StageTimes
    """Times of one micro-batch."""
    memory: StageMemory[float]
    limit_gib: float
    """Memory of the GPU that has least room for it."""
    held: tuple[HeldOnKind, ...] = ()
    """The same of each kind of node, the fullest first, where its replicas keep unlike parts of what they share out."""

    @property
    def contents(self) -> str:
        """Its layers, in words, chunk by chunk."""
        return (" | " if any(" " in chunk for chunk in self.holds) else "+").join(self.holds)

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
    """Events of each stage in the order of time; 0 is when the first stage begins. Those without a micro-batch have -1.
    Unlike replicas give those of the slowest."""
    basis: Basis
    """The worst of what its times rest on."""
    pipelines: Sequence[Pipeline]
    """What it follows from, each kind of replica once."""
    slowest: int
    """The number of the pipeline that `stages` and `events` are of."""
    by_rank: bool = False
    """Whether the ranks of a stage do unlike things, so that no pipeline stands for all."""

    @property
    def durations(self) -> Durations:
        """What the stages take in the slowest replicas."""
        return self.pipelines[self.slowest].durations

    @property
    def schedule(self) -> Mapping[str, Any]:
        """What the slowest replicas do: actions, as in docs/formats.md."""
        return self.pipelines[self.slowest].schedule

    @property
    def parts(self) -> Parts:
        """Where the time of the iteration goes; arrays of one."""
        ends = {name: [event.end for event in self.events if event.kind == name] for name in (GRADIENTS, NORM)}
        computed = max(event.end for event in self.events if event.micro_batch >= 0)
        summed, known = max([computed, *ends[GRADIENTS]]), max(ends[NORM])
        seconds = {
            "total": self.iteration_s,
            "pipeline": self.iteration_s - (known - computed),
            "sums": summed - computed,
            "embedding": known - summed,
            "optimizer": max(self.durations.optimizer),
        }
        return Parts(**{name: np.array([value]) for name, value in seconds.items()})

    @property
    def waiting(self) -> list[float]:
        """Return the part of each event in which its stage waits for others."""
        return [waiting(event, self.durations.embedding) for event in self.events]


def predict(
    experiment: Experiment, schedule: Mapping[str, Any] | None = None, calibration: Calibration | None = None
) -> Prediction:
    """Predict an experiment, such as a run's frozen configuration (`conf.compose.read_experiment`).

    `schedule` is the content of its `parallel.schedule_file`, if it has one; a run has a copy (`schedule.json`).

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for the tensor size, the schedule is none of the plan's, or the calibration
            is of other nodes.
    """
    placed = planned(experiment)
    if calibration is not None:
        calibrated = {kind.name: kind for kind in calibration.applied(sorted(placed.kinds, key=lambda kind: kind.name))}
        placed = replace(placed, nodes=[calibrated[node.name] for node in placed.nodes])
    return predict_plan(placed, schedule)


def planned(experiment: Experiment) -> PlacedTraining:
    """An experiment's training on its nodes.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: the model is a module that no profile knows.
    """
    order = experiment.node_order.groups
    counts = dict(zip(order, experiment.ranks_per_node(), strict=True))
    groups = {
        name: replace(experiment.cluster.groups[name], gpus_per_node=gpus) for name, gpus in sorted(counts.items())
    }
    whole = experiment.cluster
    of_pairs, leaves = links.only(whole.links, groups), topology.only(whole.topology, groups)
    used = replace(whole, groups=groups, links=of_pairs, topology=leaves)
    kinds = {kind.name: kind for kind in node_kinds(used)}
    training = with_known_blocks(Training.of(experiment), list(kinds.values()))
    parallel = training.parallel
    if parallel.alike:  # which may be written stage by stage all the same
        alike = replace(parallel, tensor=parallel.tensor_size, data=parallel.first_replicas, replicas=None)
        training = replace(training, parallel=alike)
    return PlacedTraining(training=training, partition=experiment.partition, nodes=[kinds[name] for name in order])


def predict_plan(plan: PlacedTraining, schedule: Mapping[str, Any] | None = None) -> Prediction:
    """Predict a training that has its nodes, such as a search's plan. Raises SearchError: a profile has no costs for
    the tensor size, or the schedule is none of the plan's."""
    training, parallel, layers, nodes = plan.training, plan.training.parallel, plan.partition.layers, plan.nodes
    if not parallel.alike or parallel.stream is not None:
        return _of_heterogeneous_stages(plan)
    if schedule is not None:
        try:
            schedule_check.parsed(schedule, parallel.pipeline, parallel.chunks, parallel.micro_batches)
        except EngineError as error:
            raise SearchError(f"parallel.schedule_file: {error}") from error
    islands = by_island(plan)
    if len(islands) > 1:
        return _slowest([predict_plan(island, schedule) for island in islands], alike=not parallel.own_plans)
    replicas = Replicas(plan)
    pipelines = replicas.pipelines(layers, schedule)
    iteration_s, events, slowest = replay_together(pipelines)
    durations = pipelines[slowest].durations
    where = place(tuple(node.gpus for node in nodes), parallel.tensor_size, parallel.data, parallel.pipeline).stages
    on = [[nodes[node] for node in stage] for stage in np.split(where.nodes, where.starts[1:])]
    return Prediction(
        iteration_s=iteration_s,
        stages=_stages(plan, on, [training] * parallel.pipeline, events, durations),
        events=events,
        basis=replicas.basis,
        pipelines=pipelines,
        slowest=slowest,
        by_rank=len({one.schedule["micro_batches"] for one in pipelines}) > 1,
    )


def _slowest(islands: Sequence[Prediction], *, alike: bool) -> Prediction:
    """Islands step together, so that all wait for the slowest, of which events are. Stages that are `alike` in all
    islands are one, with the memory of the island that has least room for it; else each island has its own."""
    number = max(range(len(islands)), key=lambda one: islands[one].iteration_s)
    slowest, before = islands[number], islands[:number]
    pipelines, first = [], 0
    for island in islands:
        pipelines += [
            one._replace(replicas=tuple(first + replica for replica in one.replicas)) for one in island.pipelines
        ]
        first += sum(len(one.replicas) for one in island.pipelines)
    stages: list[Stage] = []
    for own, every in (
        zip(slowest.stages, zip(*(island.stages for island in islands), strict=True), strict=True) if alike else ()
    ):
        fullest = min(every, key=lambda stage: stage.limit_gib - stage.memory_gib)
        stages.append(
            replace(
                own,
                groups=tuple(dict.fromkeys(name for stage in every for name in stage.groups)),
                gpus=tuple(dict.fromkeys(name for stage in every for name in stage.gpus)),
                memory=fullest.memory,
                limit_gib=fullest.limit_gib,
            )
        )
    for count, island in () if alike else enumerate(islands):
        waits = slowest.iteration_s - island.iteration_s
        stages += [
            replace(own, name=stage_name(stage, count), terms=replace(own.terms, bubble=own.terms.bubble + waits))
            for stage, own in enumerate(island.stages)
        ]
    skipped = 0 if alike else sum(len(island.stages) for island in before)
    return replace(
        slowest,
        stages=stages,
        events=[replace(event, stage=event.stage + skipped) for event in slowest.events],
        basis=max(island.basis for island in islands),
        pipelines=pipelines,
        slowest=sum(len(island.pipelines) for island in before) + slowest.slowest,
        by_rank=len({one.schedule["micro_batches"] for one in pipelines}) > 1,
    )


def _of_heterogeneous_stages(plan: PlacedTraining) -> Prediction:
    """Its events are, stage by stage, those of the rank that ends last."""
    parallel, stages = plan.training.parallel, HeterogeneousStages(plan)
    layout = parallel.layout
    every = range(layout.world_size)
    found: Iteration | StreamIteration
    if parallel.stream is None:
        actions = actions_of(parallel)
        found = iteration(layout, actions, stages.ranks)
        passes = [actions[stage][dp] for stage, dp, _ in map(layout.stage_dp_tp, every)]
    else:
        count = parallel.global_batch_size // parallel.micro_batch_size
        found = stream_iteration(layout, parallel.stream, count, stages.ranks)
        passes = [*found.passes]
    of_stage = [[rank for rank in every if layout.stage_dp_tp(rank)[0] == s] for s in range(layout.stages)]
    shown = [max(ranks, key=lambda rank: (computed_until(found.events[rank]), -rank)) for ranks in of_stage]
    events = [event for rank in shown for event in found.events[rank]]
    lists = [passes[rank] for rank in shown]
    ranks = [stages.ranks[rank] for rank in shown]
    durations = Durations(
        times=[rank.times for rank in ranks],
        gradients=[rank.gradients for rank in ranks],
        embedding=max(rank.embedding for rank in ranks),
        optimizer=[rank.optimizer for rank in ranks],
        weights=[rank.weights for rank in ranks],
    )
    kinds = {kind.name: kind for kind in plan.nodes}
    on = [[kinds[name] for name in dict.fromkeys(stages.kinds[rank] for rank in ranks)] for ranks in of_stage]
    return Prediction(
        iteration_s=found.seconds,
        stages=_stages(plan, on, stages.trainings, events, durations),
        events=events,
        basis=stages.basis,
        pipelines=[
            Pipeline(
                schedule=as_json(lists, parallel.chunks, parallel.micro_batches),
                durations=durations,
                replicas=(),
                kinds=tuple(stages.kinds[rank] for rank in shown),
            )
        ],
        slowest=0,
        by_rank=True,
    )


def _stages(
    plan: PlacedTraining,
    on: Sequence[Sequence[NodeKind]],
    trainings: Sequence[Training],
    events: Sequence[Event],
    durations: Durations,
) -> list[Stage]:
    """`on` are the nodes of each stage, `trainings` have its sizes."""
    parallel, layers = plan.training.parallel, plan.partition.layers
    if plan.training.in_streams:
        return [_in_streams(plan, events, durations)]
    holds = plan.training.blocks.contents(layers)
    held = held_on_kinds(plan, trainings)
    return [
        Stage(
            name=str(number),
            layers=layers[number :: parallel.pipeline],
            holds=tuple(holds[number :: parallel.pipeline]),
            groups=tuple(dict.fromkeys(kind.name for kind in nodes)),
            gpus=tuple(dict.fromkeys(kind.gpu.name for kind in nodes)),
            terms=terms([event for event in events if event.stage == number], durations.embedding),
            times=durations.times[number],
            memory=kinds[0].memory,
            limit_gib=kinds[0].kind.gpu.memory_gib,
            held=tuple(kinds) if len({one.proportion for one in kinds}) > 1 else (),
        )
        for number, (nodes, kinds) in enumerate(zip(on, held, strict=True))
    ]


def _in_streams(plan: PlacedTraining, events: Sequence[Event], durations: Durations) -> Stage:
    """The one stage of a plan with several streams, with the memory of the replica that has least left of it."""
    layers, training = plan.partition.layers, plan.training
    on = [node for node in plan.nodes for _ in range(node.gpus)]
    found = []
    kinds = {node.name: node for node in on}
    for streams, name in {*zip(training.parallel.streams_of, [node.name for node in on], strict=True)}:
        memory = memory_of_streams(memory_of(training, layers, 0, streams, 1), streams)
        memory, gib = with_allowance(kinds[name], training, memory), kinds[name].gpu.memory_gib
        found.append((gib - memory.of(sum(layers)) / GIB, gib, memory))
    _, limit_gib, memory = min(found, key=lambda row: row[:2])
    return Stage(
        name="0",
        layers=tuple(layers),
        holds=tuple(training.blocks.contents(layers)),
        groups=tuple(dict.fromkeys(node.name for node in on)),
        gpus=tuple(dict.fromkeys(node.gpu.name for node in on)),
        terms=terms(events, durations.embedding),
        times=durations.times[0],
        memory=memory,
        limit_gib=limit_gib,
    )
