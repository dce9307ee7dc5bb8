"""What the ranks of a plan take whose stages have unlike numbers of replicas, or tensor groups of unlike sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from conf.schema.values.partition import Shares
from fasop.costs.arrays import Floats, Integers, rolled
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis
from fasop.costs.network.heterogeneous_placement import place_heterogeneous
from fasop.costs.network.links import Link
from fasop.costs.parallelism import Parallelism
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.simulation.linear import Layers, Linear
from fasop.simulation.nodes import Nodes, times_on
from fasop.simulation.on_nodes import by_parameters, handing_out, on_nodes, pass_times
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.placed_links import PlacedLinks, on_pairs
from fasop.simulation.ranks.replay import RankDurations, StageTimes
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import SCATTERS
from megatron_ext.contract.schedule.iteration import replicated, schedule
from megatron_ext.contract.schedule.schedules import Actions
from megatron_ext.contract.schedule.streams import Semantics

Size = tuple[int, int, int]
"""A stage's size: ranks of a tensor group, and replicas; and the first stage that keeps the same share of what replicas
may share out, and the same in its host's memory."""


@dataclass(frozen=True, kw_only=True)
class RankColumns:
    """What a rank takes with each of some partitions; seconds, [partitions], and of passes [chunks, partitions]."""

    forward: Floats
    backward: Floats
    send_forward: Floats
    send_backward: Floats
    busy_forward: Floats
    busy_backward: Floats
    one_way_out: bool
    gradients: Floats
    embedding: float
    optimizer: Floats
    weights: Floats

    def of(self, column: int) -> RankDurations:
        """With one of the partitions."""
        return RankDurations(
            times=StageTimes(
                forward=self.forward[:, column].tolist(),
                backward=self.backward[:, column].tolist(),
                send_forward=float(self.send_forward[column]),
                send_backward=float(self.send_backward[column]),
                busy_forward=float(self.busy_forward[column]),
                busy_backward=float(self.busy_backward[column]),
                one_way_out=self.one_way_out,
            ),
            gradients=float(self.gradients[column]),
            embedding=self.embedding,
            optimizer=float(self.optimizer[column]),
            weights=float(self.weights[column]),
        )


class Lines(NamedTuple):
    """What stages of one size take, as functions of their layers, were all stages of it."""

    pipelines: Pipelines
    """One."""
    handing: Linear

    def taken(self, partitions: Layers) -> _Taken:
        """With partitions [parts, partitions]."""
        one = self.pipelines
        held, messages = one.held(partitions), (*one.messages(partitions), *one.messages_back(partitions))
        hop, busy, back, busy_back = (np.broadcast_to(part, (len(part), partitions.shape[1])) for part in messages)
        return _Taken(
            send_forward=hop,
            busy_forward=busy,
            send_backward=rolled(back, 1, 0),
            busy_backward=rolled(busy_back, 1, 0),
            gradients=one.exposed(held),
            weights=self.handing.of(held),
        )


class _Taken(NamedTuple):
    """Seconds, [stages, partitions] each."""

    send_forward: Floats
    busy_forward: Floats
    send_backward: Floats
    busy_backward: Floats
    gradients: Floats
    weights: Floats


class GpuLines(NamedTuple):
    """What a GPU of one kind takes by itself in stages of one size, as functions of their layers."""

    forward: Linear
    backward: Linear
    step: Linear

    @classmethod
    def of(cls, kind: NodeKind, training: Training) -> GpuLines:
        parallel = training.parallel
        of_gpu = Nodes([kind], np.zeros((1, 1), np.int64)).gpu_times(training, [times_on(kind, training)])
        times = np.repeat(of_gpu[:, np.newaxis], parallel.pipeline, axis=1)
        half = len(times) // 2 - 1
        step = times[-2] / (parallel.data if parallel.sharded_optimizer else 1)
        stepping = Link(latency_s=np.zeros_like(step), s_per_byte=step)
        return cls(
            forward=pass_times(training, times[:half]),
            backward=pass_times(training, times[half:-2], times[-1]),
            step=by_parameters(training, stepping, layer_numbers(training).stepped),
        )


class HeterogeneousStages:
    """The stages of a plan, each with the costs of its own sizes.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """

    def __init__(self, plan: PlacedTraining) -> None:
        self._plan, self._layout = plan, plan.training.parallel.layout
        kept = [plan.training.parallel.of_stage(stage) for stage in range(self._layout.stages)]
        alike = [kept.index(one) for one in kept]
        self.sizes: list[Size] = [*zip(self._layout.tensors, self._layout.replicas, alike, strict=True)]
        """The size of each stage."""
        self._trained = {size: alone(plan.training, *size[:2], kept[size[2]]) for size in dict.fromkeys(self.sizes)}
        placed = _UnlikeNodes(plan.nodes, self._layout)
        self.whole = self._lines(self._trained, placed)
        """For each size, each stage as slow as its slowest GPU."""
        self.alone = {
            (kind.name, size): GpuLines.of(kind, one) for kind in plan.kinds for size, one in self._trained.items()
        }
        self._gathered = self._lines({size: _unshared(one) for size, one in self._unshared.items()}, placed)

    @property
    def _unshared(self) -> Mapping[Size, Training]:
        """Those whose ranks may hand on all of a message, and not their share of its sequence."""
        tensors = {tensor for tensor, _, _ in self._trained}
        return self._trained if self._plan.training.parallel.sequence_parallel and len(tensors) > 1 else {}

    @property
    def trainings(self) -> list[Training]:
        """List the training of each stage: with its sizes in all stages."""
        return [self._trained[size] for size in self.sizes]

    @property
    def basis(self) -> Basis:
        """The worst of what their times rest on."""
        return Basis(max(int(lines.pipelines.basis[0]) for lines in self.whole.values()))

    @staticmethod
    def _lines(trainings: Mapping[Size, Training], nodes: _UnlikeNodes) -> dict[Size, Lines]:
        """Work out the lines as if all stages had the sizes of each training, on the links that they have in the
        plan."""
        return {size: Lines(on_nodes(one, nodes), handing_out(one, nodes)) for size, one in trainings.items()}

    @cached_property
    def kinds(self) -> list[str]:
        """List the name of each rank's kind of node."""
        return [node.name for node in self._plan.nodes for _ in range(node.gpus)]

    @cached_property
    def places(self) -> list[tuple[int, str]]:
        """List the stage of each rank, and the name of its kind of node."""
        return [(self._layout.stage_dp_tp(rank)[0], name) for rank, name in enumerate(self.kinds)]

    @cached_property
    def ranks(self) -> list[RankDurations]:
        """List the durations of each rank, with the plan's own partition."""
        columns = self.columns(np.array([self._plan.partition.layers]).T)
        known = {id(one): one.of(0) for one in columns}
        return [known[id(one)] for one in columns]

    def unhidden(self, layers: int) -> HeterogeneousStages:
        """The same without sums that backward passes hide, and without layers computed again: see
        `Pipelines.unhidden`."""
        found = copy(self)
        found.whole, found._gathered = _unhidden(self.whole, layers), _unhidden(self._gathered, layers)
        found.alone = {key: own._replace(backward=replace(own.backward, again=None)) for key, own in self.alone.items()}
        return found

    def columns(self, partitions: Layers) -> list[RankColumns]:
        """List what each rank takes with partitions [parts, partitions]: its own GPU's time to compute and to step; of
        all else, what its stage takes. Ranks that take the same share an object."""
        whole = {size: lines.taken(partitions) for size, lines in self.whole.items()}
        gathered = {size: lines.taken(partitions) for size, lines in self._gathered.items()}
        one = self.whole[self.sizes[0]].pipelines
        counted, held = one.counted(partitions), one.held(partitions)
        passes = {key: (own.forward.of(counted), own.backward.of(counted)) for key, own in self.alone.items()}
        steps = {key: own.step.of(held) for key, own in self.alone.items()}
        known = {
            (stage, name): self._rank(
                stage,
                whole[size],
                passes[name, size],
                steps[name, size],
                gathered.get(size, whole[size]),
            )
            for stage, name in dict.fromkeys(self.places)
            for size in [self.sizes[stage]]
        }
        return [known[place] for place in self.places]

    def _rank(
        self, stage: int, whole: _Taken, passes: tuple[Floats, Floats], step: Floats, gathered: _Taken
    ) -> RankColumns:
        """`gathered` has the messages to stages of another tensor size: the sequence is gathered before such a cut."""
        layout = self._layout
        tensors, stages = layout.tensors, layout.stages
        ahead = whole if tensors[stage] == tensors[(stage + 1) % stages] else gathered
        back = whole if tensors[stage] == tensors[stage - 1] else gathered
        return RankColumns(
            forward=passes[0][stage::stages],
            backward=passes[1][stage::stages],
            send_forward=ahead.send_forward[stage],
            busy_forward=ahead.busy_forward[stage],
            send_backward=back.send_backward[stage],
            busy_backward=back.busy_backward[stage],
            one_way_out=self.one_way_out(stage),
            gradients=whole.gradients[stage],
            embedding=self.embedding(stage),
            optimizer=step[stage] + whole.weights[stage],
            weights=whole.weights[stage],
        )

    def one_way_out(self, stage: int) -> bool:
        """Whether messages of a stage to both its neighbours leave by one link."""
        ways = self.whole[self.sizes[stage]].pipelines.one_way_out
        return ways is not None and bool(ways[stage])

    def embedding(self, stage: int) -> float:
        """The first and the last stage add up its gradient in as many parts as both can have whole: of a tensor group
        of 2 ranks and one of 4 each rank of the first has two, one after another, and each of the other one."""
        layout, ends = self._layout, (0, self._layout.stages - 1)
        if stage not in ends or layout.stages == 1:
            return 0.0
        parts = math.lcm(*(layout.tensors[end] for end in ends))
        each = [float(self.whole[self.sizes[end]].pipelines.embedding[0]) for end in ends]
        part = max(seconds * layout.tensors[end] / parts for end, seconds in zip(ends, each, strict=True))
        replicas = [layout.replicas[end] for end in ends]
        members = sum(replicas) / min(replicas)
        return part * parts / layout.tensors[stage] * 2 * (members - 1) / members


def _unhidden(lines: Mapping[Size, Lines], layers: int) -> dict[Size, Lines]:
    return {size: one._replace(pipelines=one.pipelines.unhidden(layers)) for size, one in lines.items()}


class _UnlikeNodes(Nodes):
    """Nodes in one order, on which ranks lie by a layout and not by the sizes of the training."""

    def __init__(self, nodes: Sequence[NodeKind], layout: Layout) -> None:
        kinds = [*{node.name: node for node in nodes}.values()]
        names = [kind.name for kind in kinds]
        super().__init__(kinds, np.array([[names.index(node.name) for node in nodes]]))
        self._layout = layout

        self._known: dict[object, PlacedLinks] = {}
        """Links by what they depend on: the sizes of messages, where they do."""

    def links_of(self, training: Training) -> PlacedLinks:
        sized = self._by_size or len({*training.messages}) > 1
        key = (self._sizes_of(training), training.parallel.tensor_size, training.parallel.data) if sized else None
        if key not in self._known:
            placed = place_heterogeneous(self.gpus, self._layout)
            self._known[key] = on_pairs(self.kinds, self.orders, training, placed)
        placed_links = self._known[key]
        if not training.shares_by_memory:
            return placed_links
        return self._part_by_part(placed_links, training)

    def capacity(self, training: Training, memory_gib: Floats) -> tuple[Integers, None]:
        """No limit: what stages keep depends on those of other sizes."""
        return np.full(memory_gib.shape, training.blocks.layers), None

    def replicas_of(self, training: Training) -> list[Integers]:
        nodes = [node for node, kind in enumerate(self.orders[0]) for _ in range(self.kinds[kind].gpus)]
        layout = self._layout
        return [
            np.array([[nodes[layout.rank(stage, dp, tp)] for tp in range(tensor)] for dp in range(replicas)])
            for stage, (tensor, replicas) in enumerate(zip(layout.tensors, layout.replicas, strict=True))
        ]


def cuts_scattered(placed: PlacedTraining) -> list[int]:
    """Returns the stages whose tensor groups send each rank's part of a message alone to the next stage."""
    training, parallel = placed.training, placed.training.parallel
    last = parallel.pipeline - (parallel.chunks == 1)
    if not training.scatters_messages or parallel.scatter_messages == "true":
        return [*range(last)] if training.scatters_messages else []
    layout = parallel.layout
    one = alone(training, layout.tensors[0], layout.replicas[0], parallel.of_stage(0))
    chosen = _UnlikeNodes(placed.nodes, layout).links_of(one).scattered
    return [] if chosen is None else np.flatnonzero(chosen[:last, 0]).tolist()


def alone(training: Training, tensor: int, replicas: int, parallel: Parallelism) -> Training:
    """The training with the sizes of one stage in all of them, and what it keeps: `parallel`."""
    count = parallel.global_batch_size // parallel.micro_batch_size
    shares = parallel.shares
    if not parallel.layout.even and parallel.stream is None:
        shares = Shares.even(count, replicas).numbers if count % replicas else None
    alike = replace(
        parallel,
        tensor=tensor,
        scatter_messages=parallel.scatter_messages if parallel.may_scatter else SCATTERS[0],
        data=replicas,
        replicas=None,
        shares=shares,
        partition=None,
        node_order=None,
        semantics=Semantics.stashing,
        update_every=1,
        depth=None,
    )
    return replace(training, parallel=alike)


def _unshared(training: Training) -> Training:
    """Without sharing the sequence."""
    return replace(training, parallel=replace(training.parallel, sequence_parallel=False))


def in_flight(parallel: Parallelism, stage: int) -> int | None:
    """Micro-batches that a rank of a stage holds at once, at most; None where stages have as many replicas
    (megatron_ext/contract/schedule/schedules.py)."""
    replicas, stream = parallel.layout.replicas, parallel.stream
    if stream is not None:
        return stream.ahead(stage) + 1
    if parallel.layout.even:
        return None
    own = replicas[stage]
    count = -(-(parallel.global_batch_size // parallel.micro_batch_size) // own)
    after, before = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
    one = parallel.schedule.definition
    return min(count, int(one.ahead(after) + 1 + one.lag(before)))


def actions_of(parallel: Parallelism) -> list[list[Actions]]:
    """What its ranks do in an iteration, by stage and replica."""
    name, layout = str(parallel.schedule), parallel.layout
    if not layout.even:
        return replicated(name, layout.replicas, parallel.global_batch_size // parallel.micro_batch_size)
    by_count = {
        count: schedule(name, layout.stages, parallel.chunks, count) for count in set(parallel.micro_batches_of)
    }
    return [[by_count[count][stage] for count in parallel.micro_batches_of] for stage in range(layout.stages)]
