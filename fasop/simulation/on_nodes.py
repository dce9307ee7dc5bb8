"""What every stage of plans takes on the nodes where it lies: `Pipelines`, made from costs, links and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from fasop.costs import overlap, sizes
from fasop.costs.arrays import Floats, Integers, distinct
from fasop.costs.context import with_shared_sequences
from fasop.costs.experts import layer_numbers, with_exchanges
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes, gradients_summed, layer_times, weights_gathered, weights_handed_out
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.memory.allowance import room_gib
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.host_activations import through_host
from fasop.costs.memory.shards import slack
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network import links
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import by_size, has_pairs
from fasop.costs.network.links import Link
from fasop.costs.network.placement import Uses, place, stage_nodes
from fasop.costs.profiles.collective_times import Operation
from fasop.costs.profiles.profile import optimizer_s_per_parameter
from fasop.costs.schedules import chunks_in_flight, filling
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.simulation.linear import Again, BackwardMessages, Hidden, LayerOrder, Linear
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.placed_links import Hops, Messages, PlacedLinks, gathering_in_groups, on_pairs, scattered

KEPT = 2**14
"""Nodes, in all orders and sizes together, whose links are kept: those of thousands of nodes are large."""
_SIZES = attrgetter("tensor", "expert", "context", "micro_batch_size", "sequence_parallel", "recompute", "offload")
"""What of a plan changes how long a GPU takes for a part of the model."""


def on_nodes(training: Training, nodes: Nodes) -> Pipelines:
    """The pipelines of `training` on nodes in each of some orders.

    Of a stage on several kinds of nodes the slowest counts, for each time of its own; of its memory the smallest.

    Raises:
        SearchError: a profile has no costs for the tensor size.
    """
    parallel, where = training.parallel, nodes.links_of(training)
    times = [times_on(kind, training) for kind in nodes.kinds]
    slowest = nodes.slowest(where.stages, training, times)
    handing, exchanged = weights_handed_out(where.handing, training), exchanged_on(training, nodes)
    stepping = slowest.step / (parallel.data if parallel.sharded_optimizer else 1)
    if training.shares_by_memory:
        stepping = _unlike_steps(training, nodes)
    step, numbers = Link(latency_s=np.zeros_like(stepping), s_per_byte=stepping), layer_numbers(training)
    backward = pass_times(training, slowest.backward, slowest.again)
    optimizer = by_parameters(training, handing, numbers.summed).plus(by_parameters(training, step, numbers.stepped))
    capacity, shares = nodes.capacity(training, slowest.memory_gib)
    alike = training.blocks.alike
    hidden = None
    if exchanged.last is not None:
        time = _after_first_bucket(training, backward.layer[..., : parallel.pipeline, :])
        if parallel.recompute.layers is not None:  # the first layers of a stage are the last ones in a backward pass
            longer = filling(parallel.schedule) * slowest.again
            most = np.full(longer.shape[1], parallel.recompute.layers)
            time = replace(time, again=Again(most=most, layer=longer))
        hidden = Hidden(time=time, last=exchanged.last)
        if training.overlaps_optimizer:
            hidden = _beside_steps(hidden, training, stepping)
    forward = pass_times(training, slowest.forward)
    if hidden is not None and training.scatters:
        behind = _behind(exchanged.sums, training, forward, backward)
        if training.gathers:
            behind = behind.plus(_gathered(where.handing, training, forward, backward))
        hidden = replace(hidden, behind=behind)
    return Pipelines(
        schedule=parallel.schedule,
        micro_batches=parallel.micro_batches,
        forward=forward,
        backward=backward,
        hop=exchanged.hop,
        busy=min(training.messages) * where.hops.link.s_per_byte,
        one_way_out=where.one_way_out,
        blocking=training.blocking,
        sums=exchanged.sums,
        optimizer=optimizer,
        embedding=exchanged.embedding,
        capacity=capacity,
        shares=shares,
        basis=np.array([time.basis for time in times])[nodes.orders].max(axis=1),
        hidden=hidden,
        order=None if alike else _order(training),
        s_per_byte=None if alike else where.hops.longer,
        back=None if where.back is None else _back(where.back, min(training.messages), alike=alike),
    )


def _behind(sums: Linear, training: Training, forward: Linear, backward: Linear) -> Linear:
    """`Hidden.behind`: sums of a micro-batch's gradients go on beside its passes."""
    before, passes = training.parallel.micro_batches - 1, _both_passes(training, forward, backward)
    return Linear(fixed=before * (sums.fixed - passes.fixed), layer=before * (sums.layer - passes.layer))


def _gathered(link: Link[Floats], training: Training, forward: Linear, backward: Linear) -> Linear:
    """What weights that are gathered for each pass add to `Hidden.behind`: twice those of all blocks for each
    micro-batch, of which the last one's go on beside its passes, too."""
    gathering = weights_gathered(link, training, training.parallel.data)
    weights = by_parameters(training, gathering, layer_numbers(training).summed)
    passes, times = _both_passes(training, forward, backward), 2 * training.parallel.micro_batches
    return Linear(
        fixed=times * weights.fixed - passes.fixed,
        layer=times * (weights.layer + gathering.latency_s) - passes.layer,
    )


def _both_passes(training: Training, forward: Linear, backward: Linear) -> Linear:
    """What both passes of a micro-batch take, through all chunks of each stage."""
    stages = training.parallel.pipeline
    fixed = (forward.fixed + backward.fixed).reshape(-1, stages, forward.fixed.shape[-1]).sum(axis=0)
    return Linear(fixed=fixed, layer=(forward.layer + backward.layer)[..., :stages, :])


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What messages and sums of gradients take, as in `Pipelines`, whatever GPUs compute."""

    hop: Floats
    sums: Linear
    last: Floats | None
    """The same as in `Hidden`; None where gradients are summed after the last backward pass."""
    embedding: Floats

    @property
    def least_exposed(self) -> Floats:
        """Return what the attribute of this name in `Pipelines` has."""
        return self.sums.fixed if self.last is None else np.minimum(self.sums.fixed, self.last)


def exchanged_on(training: Training, nodes: Nodes) -> Exchanged:
    """Work out what `training` exchanges on these nodes, in each of their orders."""
    where = nodes.links_of(training)
    summing = gradients_summed(where.sums, training)
    sums = by_parameters(training, summing, layer_numbers(training).summed)
    return Exchanged(
        hop=where.hops.link.takes(np.array(float(min(training.messages)))),
        sums=_in_buckets(training, sums, summing) if training.overlaps else sums,
        last=_last_bucket(training, summing) if training.overlaps else None,
        embedding=_embedding(where.embedding, training),
    )


def _back(hops: Hops, shortest: int, *, alike: bool) -> BackwardMessages:
    return BackwardMessages(
        hop=hops.link.takes(np.array(float(shortest))),
        busy=shortest * hops.link.s_per_byte,
        s_per_byte=None if alike else hops.longer,
    )


def _order(training: Training) -> LayerOrder:
    messages = np.array(training.messages, float)
    return LayerOrder(counts=training.blocks.counts, extra=messages - messages.min())


def handing_out(training: Training, nodes: Nodes) -> Linear:
    """The part of `Pipelines.optimizer` that handing out the new weights of a sharded one takes."""
    where = nodes.links_of(training)
    return by_parameters(training, weights_handed_out(where.handing, training), layer_numbers(training).summed)


def _capacity_together(training: Training, nodes: Nodes, least_gib: Floats) -> tuple[Integers, Floats | None]:
    """Do as `_capacity` where replicas share out by memory: what they share fits if it fits into what all else leaves
    of their GPUs together, and all else must fit into the smallest."""
    replicas = training.parallel.data
    mean_gib = np.stack([one.mean(axis=0) for one in nodes.rooms_gib(training)])
    together, shares = _capacity(training, mean_gib, (1 + replicas * slack(replicas)) / replicas)
    alone, _ = _capacity(training, least_gib, 0.0)
    return np.minimum(together, alone), shares


def _unlike_steps(training: Training, nodes: Nodes) -> Floats:
    """[stages, pipelines]: seconds of the optimizer for a parameter, of the replica that takes longest for its part of
    them; parts are those with as many layers in each stage."""
    layers = -(-training.blocks.layers // training.parallel.pipeline)
    stages = np.arange(float(training.parallel.pipeline)).reshape(-1, 1)
    held = None
    if training.parallel.chunks > 1:
        held = training.parallel.schedule.definition.held(stages, len(stages), training.parallel.chunks)
    taken = stage_memory(training, stages, held, part=0.0).of(layers)
    steps = np.array([step_s_per_parameter(kind, training) for kind in nodes.kinds])
    found = []
    for rooms, ranks, beside in zip(nodes.rooms_gib(training), nodes.replicas_of(training), taken, strict=True):
        left = np.maximum(rooms * GIB - beside, 1.0)
        found.append((left / left.sum(axis=0) * steps[nodes.orders.T[ranks]].max(axis=1)).max(axis=0))
    return np.stack(found)


def _capacity(training: Training, memory_gib: Floats, part: float | None = None) -> tuple[Integers, Floats | None]:
    """The most layers of each stage and, of several chunks, the `shares` of its memory (fasop/simulation/pipelines.py).
    Of what replicas share out a rank keeps such a `part`; None: all keep as much.

    Layers are as evenly shared by the chunks as they can, the first ones having one more.
    """
    parallel, layers, chunks = training.parallel, training.blocks.layers, training.parallel.chunks
    stages = np.arange(float(parallel.pipeline)).reshape(-1, 1)
    if not training.blocks.alike:
        return _capacity_by_kind(training, memory_gib, stages, part)
    if chunks == 1:
        return stage_memory(training, stages, part=part).capacity(memory_gib), None
    held = chunks_in_flight(parallel.schedule, parallel.pipeline, parallel.micro_batches, chunks)
    memory = stage_memory(training, stages, held[..., np.newaxis].astype(float), part=part)
    room = memory_gib * GIB - memory.fixed
    even = (np.arange(layers + 1)[:, np.newaxis] + chunks - 1 - np.arange(chunks)) // chunks
    taken = np.einsum("lc,mcs->lms", even, memory.layer[..., 0]).max(axis=1)
    capacity = [np.searchsorted(of, free, side="right") - 1 for of, free in zip(taken.T, room, strict=True)]
    shares = memory.layer / np.where(room > 0, room, np.nan)
    return np.array(capacity), shares.reshape(len(held), -1, room.shape[1])


def _capacity_by_kind(
    training: Training, memory_gib: Floats, stages: Floats, part: float | None
) -> tuple[Integers, Floats]:
    """Do as `_capacity`, for the smallest kind of layer; the shares are [moments, kinds, parts, pipelines]."""
    parallel, kinds = training.parallel, range(len(training.blocks.kinds))
    held = None
    if parallel.chunks > 1:
        every = chunks_in_flight(parallel.schedule, parallel.pipeline, parallel.micro_batches, parallel.chunks)
        held = every[..., np.newaxis].astype(float)
    memory = [stage_memory(training, stages, held, kind, part=part) for kind in kinds]
    room = memory_gib * GIB - memory[0].fixed
    free = np.where(room > 0, room, np.nan)
    shares = np.stack([np.broadcast_to(one.layer / free, (*one.layer.shape[:-1], free.shape[-1])) for one in memory])
    whole = np.moveaxis(shares.reshape(len(kinds), -1, parallel.virtual_stages, free.shape[-1]), 0, 1)
    lightest = np.min([one.layer.reshape(-1, parallel.pipeline, 1).max(axis=0) for one in memory], axis=0)
    return np.floor(room / lightest).astype(np.int64), whole


def times_on(kind: NodeKind, training: Training) -> LayerTimes:
    """What the parts of the model take on a GPU of such a node, calibrated. A search asks for few that differ, again
    and again, so the node knows them."""
    parts = (training.model, training.engine, training.adapters)
    key = (*_SIZES(training.parallel), training.precision, training.kept_values, *map(id, parts))
    if key not in kind.known_times:
        kind.known_times[key] = (_times_on(kind, training), parts)  # while it has these, no others have their ids
    found: LayerTimes = kind.known_times[key][0]
    return found


def _times_on(kind: NodeKind, training: Training) -> LayerTimes:
    parallel = training.parallel
    shared = parallel.tensor_size if parallel.sequence_parallel else 1  # a rank has but its part
    sums = Exchange(Operation.all_reduce, parallel.tensor_size, float(max(training.crossing) * shared))
    within = kind.within(sums)
    found = layer_times(kind.gpu, kind.profile, training, within)
    found = through_host(found, kind.gpu, training)
    found = found.multiplied(kind.factors.forward, kind.factors.backward)
    return with_exchanges(with_shared_sequences(found, kind, training), kind, training)


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
        return distinct(self.first_alike[nodes], axis=0)

    def _distinct(self, uses: Uses) -> Uses:
        """Return the uses without those that are as another one of their item, in every order: of a thousand nodes in a
        few orders most are."""
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
            return _capacity_together(training, self, memory_gib)
        return _capacity(training, memory_gib)

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


def step_s_per_parameter(kind: NodeKind, training: Training) -> float:
    """Return the seconds in which such a node's GPU updates a parameter. What is offloaded comes and goes meanwhile."""
    computed = optimizer_s_per_parameter(kind.gpu, kind.profile, training.precision)
    if training.offloads:
        computed = max(computed, 4.0 * training.offloaded_values / (kind.gpu.host_gb_per_s * 1e9))
    return kind.factors.optimizer * computed


def stages_summing_by_node(placed: PlacedTraining) -> list[int]:
    """Returns the stages that sum gradients within nodes first; none if that is not asked for."""
    kinds = placed.kinds
    if not placed.training.reduces_by_node:
        return []
    names = [kind.name for kind in kinds]
    order = np.array([[names.index(node.name) for node in placed.nodes]])
    better = Nodes(kinds, order).links_of(placed.training).by_node
    return [] if better is None else np.flatnonzero(better[:, 0]).tolist()


def pass_times(training: Training, times: Floats, again: Floats | None = None) -> Linear:
    """[parts, pipelines], from the times of embedding, head and layers by stage; `again` is what a layer takes longer
    that is computed again, where not all are."""
    embedding, head, *kinds = times
    layers = [np.concatenate([layer] * training.parallel.chunks) for layer in kinds]
    fixed = np.zeros_like(layers[0])
    fixed[0] += embedding[0]
    fixed[-1] += head[-1]
    most, longer = training.parallel.recompute.layers, None
    if again is not None and most is not None:
        every = np.concatenate([again] * training.parallel.chunks)
        longer = Again(most=np.full(every.shape[1], most), layer=every)
    return Linear(fixed=fixed, layer=layers[0] if training.blocks.alike else np.stack(layers), again=longer)


def by_parameters(training: Training, link: Link[Floats], of_layer: Sequence[float]) -> Linear:
    """What takes so many seconds for each parameter of a stage's ranks; a layer of each kind has so many."""
    model, tensor = training.model, training.parallel.tensor_size
    fixed = np.zeros((training.parallel.pipeline, 1))
    fixed[0] += sizes.embedding_parameters(model, tensor)
    fixed[-1] += sizes.head_parameters(model, tensor, own_word=len(fixed) > 1)
    return Linear(fixed=link.takes(fixed), layer=link.s_per_byte * _of_kinds(training, of_layer))


def _of_kinds(training: Training, numbers: Sequence[float]) -> Floats:
    """[kinds, 1, 1]; where all layers are alike []."""
    return np.array(numbers[0]) if training.blocks.alike else np.array(numbers).reshape(-1, 1, 1)


def _in_buckets(training: Training, sums: Linear, summing: Link[Floats]) -> Linear:
    """With the latency of every bucket."""
    model, tensor, kinds = training.model, training.parallel.tensor_size, range(len(training.blocks.kinds))
    buckets = [overlap.buckets_per_layer(model, tensor, kind) for kind in kinds]
    return replace(sums, layer=sums.layer + _of_kinds(training, buckets) * summing.latency_s)


def _after_first_bucket(training: Training, layer: Floats) -> Linear:
    """`Hidden.time`; `layer` is the backward pass of one, by stage. Where layers differ, the first bucket is of those
    that take longest."""
    model, tensor, kinds = training.model, training.parallel.tensor_size, range(len(training.blocks.kinds))
    layer = filling(training.parallel.schedule) * layer
    if isinstance(model, MeasuredModule):
        every = layer[np.newaxis] if layer.ndim == 2 else layer
        whole = np.tensordot(training.blocks.counts[:, -1].astype(float), every, axes=1)
        before = -overlap.first_bucket_share(model) * (whole if layer.ndim == 2 else whole[np.newaxis])
    else:
        before = -_of_kinds(training, [overlap.first_bucket_layers(model, tensor, kind) for kind in kinds]) * layer
    return Linear(fixed=before if layer.ndim == 2 else before.min(axis=0), layer=layer)


def _last_bucket(training: Training, summing: Link[Floats]) -> Floats:
    """`Hidden.last`."""
    model, tensor, stages = training.model, training.parallel.tensor_size, training.parallel.pipeline
    first, other = (overlap.last_bucket_parameters(model, tensor, first=way) for way in (True, False))
    return summing.takes(np.array([[first], *[[other]] * (stages - 1)]))


def _beside_steps(hidden: Hidden, training: Training, stepping: Floats) -> Hidden:
    """Work out what hides sums in a data parallel plan whose weights are updated bucket by bucket, `stepping` seconds
    for a parameter."""
    parameters = training.blocks.counts[:, -1] @ np.array(sizes.kind_parameters(training.model, 1, own_word=False))
    parameters += sizes.embedding_parameters(training.model, 1)
    parameters += sizes.head_parameters(training.model, 1, own_word=False)
    before_last = max(0.0, parameters - overlap.last_bucket_parameters(training.model, 1, first=True))
    steps = stepping * before_last
    time = replace(hidden.time, fixed=hidden.time.fixed + steps)
    return Hidden(time=time, last=np.maximum(hidden.last - steps, 0.0))


def _embedding(link: Link[Floats], training: Training) -> Floats:
    parallel = training.parallel
    parameters, holders = sizes.shared_parameters(training.model, parallel.tensor_size)
    size = training.gradient_bytes * parameters
    whole = link.all_reduce(min(holders, parallel.pipeline)).takes(np.array(float(size)))
    return whole.reshape(-1)
