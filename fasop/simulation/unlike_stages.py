"""What the ranks of a plan take whose stages have unlike numbers of replicas, or tensor groups of unlike sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from conf.schema.parallel import Parallel, Schedule
from conf.schema.partition import Shares
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import Basis
from fasop.costs.training import PlacedTraining, Training
from fasop.costs.unlike_placement import place_unlike
from fasop.simulation.iteration import Durations
from fasop.simulation.on_nodes import Nodes, handing_out, on_nodes
from fasop.simulation.placed_links import PlacedLinks, on_pairs
from fasop.simulation.rank_times import RankDurations
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedules import Actions, replicated, schedule


class UnlikeStages:
    """The stages of a plan, each with the costs of its own sizes.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """

    def __init__(self, plan: PlacedTraining) -> None:
        self._plan, self._layers = plan, plan.partition.layers
        self._layout = plan.training.parallel.layout
        sizes = [*zip(self._layout.tensors, self._layout.replicas, strict=True)]
        trained = {size: _like(plan.training, *size) for size in dict.fromkeys(sizes)}
        self.trainings = [trained[size] for size in sizes]
        """By stage: with its sizes in all stages."""
        whole = {size: self._durations(one, plan.nodes) for size, one in trained.items()}
        self.basis = max(basis for _, basis in whole.values())
        """The worst of what their times rest on."""
        self._whole = [whole[size][0] for size in sizes]
        alone = {
            kind.name: {size: self._durations(one, _all_of(plan.nodes, kind))[0] for size, one in trained.items()}
            for kind in plan.kinds
        }
        self._alone = {name: [of_size[size] for size in sizes] for name, of_size in alone.items()}

    def _durations(self, training: Training, nodes: Sequence[NodeKind]) -> tuple[Durations, Basis]:
        """As if all stages had the sizes of `training`, on the links that they have in the plan."""
        placed = _UnlikeNodes(nodes, self._layout)
        lines = on_nodes(training, placed)
        return Durations.of(lines, handing_out(training, placed), self._layers), Basis(int(lines.basis[0]))

    @cached_property
    def kinds(self) -> list[str]:
        """By rank, the name of its kind of node."""
        return [node.name for node in self._plan.nodes for _ in range(node.gpus)]

    @cached_property
    def ranks(self) -> list[RankDurations]:
        """By rank: its own GPU's time to compute and to step; of all else, what its stage takes."""
        known = {
            (stage, name): self._rank(stage, name)
            for stage, name in {(self._layout.stage_dp_tp(rank)[0], name) for rank, name in enumerate(self.kinds)}
        }
        return [known[self._layout.stage_dp_tp(rank)[0], name] for rank, name in enumerate(self.kinds)]

    def _rank(self, stage: int, kind: str) -> RankDurations:
        whole, own = self._whole[stage], self._alone[kind][stage]
        sends = whole.times[stage]
        step = own.optimizer[stage] - own.weights[stage]
        return RankDurations(
            times=replace(sends, forward=own.times[stage].forward, backward=own.times[stage].backward),
            gradients=whole.gradients[stage],
            embedding=self._embedding(stage),
            optimizer=step + whole.weights[stage],
            weights=whole.weights[stage],
        )

    def _embedding(self, stage: int) -> float:
        """The first and the last stage add up its gradient in as many parts as both can have whole: of a tensor group
        of 2 ranks and one of 4 each rank of the first has two, one after another, and each of the other one."""
        layout, ends = self._layout, (0, self._layout.stages - 1)
        if stage not in ends or layout.stages == 1:
            return 0.0
        parts = math.lcm(*(layout.tensors[end] for end in ends))
        part = max(self._whole[end].embedding * layout.tensors[end] / parts for end in ends)
        replicas = [layout.replicas[end] for end in ends]
        members = sum(replicas) / min(replicas)
        return part * parts / layout.tensors[stage] * 2 * (members - 1) / members


class _UnlikeNodes(Nodes):
    """Nodes in one order, on which ranks lie by a layout and not by the sizes of the training."""

    def __init__(self, nodes: Sequence[NodeKind], layout: Layout) -> None:
        kinds = [*{node.name: node for node in nodes}.values()]
        names = [kind.name for kind in kinds]
        super().__init__(kinds, np.array([[names.index(node.name) for node in nodes]]))
        self._layout = layout

    def links_of(self, training: Training) -> PlacedLinks:
        gpus = tuple(self.kinds[kind].gpus for kind in self.orders[0])
        return on_pairs(self.kinds, self.orders, training, place_unlike(gpus, self._layout))


def _like(training: Training, tensor: int, replicas: int) -> Training:
    """With the sizes of one stage in all of them."""
    parallel = training.parallel
    count = parallel.global_batch_size // parallel.micro_batch_size
    shares = parallel.shares
    if not parallel.layout.even:
        shares = str(Shares.even(count, replicas)) if count % replicas else None
    alike = replace(
        parallel, tensor=tensor, data=replicas, replicas=None, shares=shares, partition=None, node_order=None
    )
    return replace(training, parallel=alike)


def _all_of(nodes: Sequence[NodeKind], kind: NodeKind) -> list[NodeKind]:
    """The same nodes, were they all of one kind."""
    return [replace(kind, name=node.name, gpus=node.gpus) for node in nodes]


def in_flight(parallel: Parallel, stage: int) -> int | None:
    """Micro-batches that a rank of a stage holds at once, at most; None where stages have as many replicas
    (megatron_ext/contract/schedules.py)."""
    replicas = parallel.layout.replicas
    if parallel.layout.even:
        return None
    own = replicas[stage]
    count = -(-(parallel.global_batch_size // parallel.micro_batch_size) // own)
    ahead, lag = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
    if parallel.schedule is Schedule.gpipe:
        return count
    return min(count, ahead + 1 + (lag if parallel.schedule is Schedule.zb_h1 else 0))


def actions_of(parallel: Parallel) -> list[list[Actions]]:
    """What its ranks do in an iteration, by stage and replica."""
    name, layout = str(parallel.schedule), parallel.layout
    if not layout.even:
        return replicated(name, layout.replicas, parallel.global_batch_size // parallel.micro_batch_size)
    by_count = {
        count: schedule(name, layout.stages, parallel.chunks, count) for count in set(parallel.micro_batches_of)
    }
    return [[by_count[count][stage] for count in parallel.micro_batches_of] for stage in range(layout.stages)]
