"""Nodes in some orders: what their GPUs take, and the links that lie between stages and replicas on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from fasop.costs.arrays import Floats, Integers, distinct, distinct_rows
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes, layer_times
from fasop.costs.memory.activations import through_host
from fasop.costs.memory.allowance import room_gib
from fasop.costs.network import links
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import by_size, has_pairs
from fasop.costs.network.links import Link
from fasop.costs.network.placement import Uses, place, stage_nodes
from fasop.costs.profiles.profile import optimizer_s_per_parameter
from fasop.costs.profiles.steps import Operation
from fasop.costs.shared_layers import with_exchanges
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.simulation import capacity
from fasop.simulation.placed_links import Hops, Messages, PlacedLinks, gathering_in_groups, on_pairs, scattered

KEPT = 2**14
"""Nodes, in all orders and sizes together, whose links are kept: those of thousands of nodes are large."""
_SIZES = attrgetter("tensor", "expert", "context", "micro_batch_size", "sequence_parallel", "recompute", "offload")
"""What of a plan changes how long a GPU takes for a part of the model."""


def times_on(kind: NodeKind, training: Training) -> LayerTimes:
    """What the parts of the model take on a GPU of such a node, calibrated. A search asks for few that differ, again
    and again, so the node knows them."""
    parts = (training.model, training.engine, training.adapters)
    key = (*_SIZES(training.parallel), training.precision, training.kept_values, *map(id, parts))
    if key not in kind.known_times:
        kind.known_times[key] = (_times_on(kind, training), parts)  # while it has these, no others have their ids
    return kind.known_times[key][0]


def _times_on(kind: NodeKind, training: Training) -> LayerTimes:
    parallel = training.parallel
    shared = parallel.tensor_size if parallel.sequence_parallel else 1  # a rank has but its part
    sums = Exchange(Operation.all_reduce, parallel.tensor_size, float(max(training.crossing) * shared))
    within = kind.within(sums)
    found = layer_times(kind.gpu, kind.profile, training, within)
    found = through_host(found, kind.gpu, training)
    found = found.multiplied(kind.factors.forward, kind.factors.backward)
    return with_exchanges(found, kind, training)


def step_s_per_parameter(kind: NodeKind, training: Training) -> float:
    """Return the seconds in which such a node's GPU updates a parameter. What is offloaded comes and goes meanwhile."""
    computed = optimizer_s_per_parameter(kind.gpu, kind.profile, training.precision)
    if training.offloads:
        computed = max(computed, 4.0 * training.offloaded_values / (kind.gpu.host_gb_per_s * 1e9))
    return kind.factors.optimizer * computed


@dataclass(frozen=True, kw_only=True)
class SlowestGpus:
    """What counts of the GPUs of each stage, [stages, pipelines]: each time of the slowest, memory of the smallest."""

    forward: Floats
    """[2 + kinds, stages, pipelines]: of embedding, head, and a layer of each kind."""
    backward: Floats
    step: Floats
    """Seconds of the optimizer, for a parameter."""
    again: Floats
    """`LayerTimes.again`."""
    memory_gib: Floats
    """Without what a rank takes there in any case."""


class Nodes:
    """What nodes of some kinds and their links are, in each of some orders [pipelines, nodes].

    All orders have the same numbers of GPUs in each place.
    """

    def __init__(self, kinds: Sequence[NodeKind], orders: Integers, *, least: bool = False) -> None:
        """With `least`, each order is of one kind, and no link of that kind's nodes with any node is quicker."""
        self.kinds = kinds
        self.orders = orders
        self._least = least
        self._has_pairs, self._by_size = has_pairs(kinds), by_size(kinds)
        self._links: dict[tuple[float, ...], PlacedLinks] = {}
        self._last_distinct: tuple[Uses, Uses] | None = None

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """[nodes]: the GPUs in each place."""
        return tuple(self.kinds[kind].gpus for kind in self.orders[0])

    @cached_property
    def _of_links(self) -> Floats:
        """[kinds, 2, 2]: latency and seconds per byte, within a node of each kind and out of it."""
        known = [(links.within(kind.group), links.between(kind.group, 1)) for kind in self.kinds]
        return np.array([[[link.latency_s, link.s_per_byte] for link in pair] for pair in known])

    @cached_property
    def first_alike(self) -> Integers:
        """[nodes]: the first node that is of the same kind as each, whatever the order."""
        first: dict[bytes, int] = {}
        columns = np.ascontiguousarray(self.orders.T)
        return np.array([first.setdefault(column.tobytes(), number) for number, column in enumerate(columns)])

    def distinct_rows(self, nodes: Integers) -> Integers:
        """Return rows of nodes without those that are as another one in every order."""
        return distinct_rows(self.first_alike[nodes])

    def _distinct(self, uses: Uses) -> Uses:
        """Return the uses without those that are as another one of their item, in every order: of a thousand nodes in a
        few orders most are. The last ones are kept: plans that differ in something else lie on the same nodes."""
        if self._last_distinct is None or self._last_distinct[0] is not uses:
            self._last_distinct = uses, self._find_distinct(uses)
        return self._last_distinct[1]

    def _find_distinct(self, uses: Uses) -> Uses:
        alike, items = self.first_alike, np.repeat(np.arange(len(uses.starts)), uses.counts)
        if (alike == np.arange(len(alike))).all():
            return uses
        rows = (items, alike[uses.nodes], uses.between, uses.sharing)
        shape = [int(row.max()) + 1 for row in rows]
        items, nodes, between, sharing = np.unravel_index(distinct(np.ravel_multi_index(rows, shape)), shape)
        starts = np.searchsorted(items, np.arange(len(uses.starts)))
        return Uses(starts=starts, nodes=nodes, between=between, sharing=sharing)

    def links_of(self, training: Training) -> PlacedLinks:
        """Those of the last sizes are kept: plans that differ in something else come one after another."""
        parallel = training.parallel
        sizes = (parallel.tensor_size, parallel.data, parallel.pipeline)
        by_node = training.reduces_by_node and parallel.data > 1
        messages = min(training.messages) if training.scatters_messages else 0
        of_size = self._sizes_of(training) if self._by_size else ()
        key = (*sizes, by_node, messages, training.shares_by_memory, *of_size)
        if key not in self._links:
            where = place(self.gpus, *sizes)
            if self._has_pairs:
                placed = on_pairs(self.kinds, self.orders, training, where, least=self._least)
            else:
                hops = self._slowest_link(where.hops, [kind.factors.messages for kind in self.kinds])
                of_sums = [kind.factors.gradients for kind in self.kinds]
                ahead, by_cut = Hops(hops, hops.s_per_byte), None
                if training.scatters_messages:
                    gather = gathering_in_groups(self.kinds, self.orders, training, where.stages)
                    ahead, by_cut = scattered(ahead, ahead, gather, training)
                placed = PlacedLinks(
                    stages=where.stages,
                    hops=ahead,
                    scattered=by_cut,
                    back=None,
                    one_way_out=where.one_way_out,
                    sums=self._slowest_link(where.sums, of_sums),
                    embedding=self._slowest_link(where.embedding, [kind.factors.embedding for kind in self.kinds]),
                )
                if by_node:
                    within, across = (self._slowest_link(where.sums, of_sums, between=way) for way in (0, 1))
                    placed = placed.with_sums_by_node(within, across, where, parallel.data, least=self._least)
            if training.shares_by_memory:
                placed = self._part_by_part(placed, training)
            if (len(self._links) + 1) * self.orders.size > KEPT:
                self._links.clear()
            self._links[key] = placed
        return self._links[key]

    @staticmethod
    def _sizes_of(training: Training) -> tuple[float, ...]:
        """What links depend on where they depend on the size of messages."""
        return *Messages.of(training), training.parallel.sharded_optimizer, training.scatters_messages

    def _part_by_part(self, placed: PlacedLinks, training: Training) -> PlacedLinks:
        """Return the links with those of rings where the replicas of a stage keep unlike parts: each of these is
        summed, or handed out, by a message of its own, which passes through all replicas."""
        unlike = np.stack([one.min(axis=0) < one.max(axis=0) for one in self.rooms_gib(training)])
        replicas = training.parallel.data
        times, longer = np.where(unlike, replicas, 1.0), np.where(unlike, replicas / (replicas - 1), 1.0)

        def passing(ring: Link[Floats]) -> Link[Floats]:
            return Link(latency_s=ring.latency_s * times, s_per_byte=ring.s_per_byte * longer)

        gathering = None if placed.gathering is None else passing(placed.gathering)
        return replace(placed, sums=passing(placed.sums), gathering=gathering)

    def replicas_of(self, training: Training) -> list[Integers]:
        """List, for each stage, the numbers of the nodes that its replicas lie on: [replicas, tensor]."""
        parallel = training.parallel
        ranks = stage_nodes(self.gpus, parallel.tensor_size, parallel.data, parallel.pipeline)
        return [np.array(of_stage).reshape(parallel.data, parallel.tensor_size) for of_stage in ranks]

    def rooms_gib(self, training: Training) -> list[Floats]:
        """List, for each stage, the GiB that each replica has for `stage_memory`: [replicas, pipelines]."""
        memory = np.array([room_gib(kind, training) for kind in self.kinds])
        return [memory[self.orders.T[ranks]].min(axis=1) for ranks in self.replicas_of(training)]

    def capacity(self, training: Training, memory_gib: Floats) -> tuple[Integers, Floats | None]:
        """Return `Pipelines.capacity` and its `shares`, where the smallest GPUs of stages have so much memory."""
        if training.shares_by_memory:
            return capacity.together(training, self.rooms_gib(training), memory_gib)
        return capacity.alone(training, memory_gib)

    def slowest(self, stages: Uses, training: Training, times: Sequence[LayerTimes]) -> SlowestGpus:
        """`times` are by kind."""
        stages = self._distinct(stages)
        kinds = self.orders.T[stages.nodes]
        most = np.maximum.reduceat(self.gpu_times(training, times)[:, kinds], stages.starts, axis=1)
        memory = np.array([room_gib(kind, training) for kind in self.kinds])[kinds]
        least = np.minimum.reduceat(memory, stages.starts, axis=0)
        half = len(most) // 2 - 1
        return SlowestGpus(forward=most[:half], backward=most[half:-2], step=most[-2], again=most[-1], memory_gib=least)

    def gpu_times(self, training: Training, times: Sequence[LayerTimes]) -> Floats:
        """[rows, kinds]: `SlowestGpus`, without memory, of a GPU of each kind; `times` are by kind."""
        rows = []
        for kind, time in zip(self.kinds, times, strict=True):
            parts = (time.embedding, time.head, *time.layers)
            step = step_s_per_parameter(kind, training)
            rows.append([*(part.forward for part in parts), *(part.backward for part in parts), step, time.again])
        return np.array(rows).T

    def _slowest_link(self, uses: Uses, factors: Sequence[float], between: int | None = None) -> Link[Floats]:
        """[items, pipelines]: the largest latency, and the lowest share of a bandwidth, of an item's links.

        `factors`, by kind, are what both are multiplied with. `between`: as in `Use`, of such links alone; 0 of none.
        """
        uses = self._distinct(uses)
        times = self._of_links * np.array(factors)[:, np.newaxis, np.newaxis]
        used = times[self.orders.T[uses.nodes], uses.between[:, np.newaxis]]
        used[..., 1] *= uses.sharing[:, np.newaxis]
        if between is not None:
            used = used * (uses.between == between)[:, np.newaxis, np.newaxis]
        reduced: Floats = np.maximum.reduceat(used, uses.starts, axis=0)
        return Link(latency_s=reduced[..., 0], s_per_byte=reduced[..., 1])


def stages_summing_by_node(placed: PlacedTraining) -> list[int]:
    """Returns the stages that sum gradients within nodes first; none if that is not asked for."""
    kinds = placed.kinds
    if not placed.training.reduces_by_node:
        return []
    names = [kind.name for kind in kinds]
    order = np.array([[names.index(node.name) for node in placed.nodes]])
    better = Nodes(kinds, order).links_of(placed.training).by_node
    return [] if better is None else np.flatnonzero(better[:, 0]).tolist()
