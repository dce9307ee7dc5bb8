"""Times that no plan of given sizes beats, in whatever order the nodes come: known before any stage is laid on a node.

A replica has a part of every stage. If GPUs, sorted by speed, share stages in that order, the j fastest stages are as
fast as they can be in any order of the nodes, for every j, where each stage lies in one node. Where replicas may lie on
different kinds of nodes, that holds for the fastest kinds together, for at least one replica, and for the mean of all
replicas. The chains of waits are those of `fasop.partition.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import overlap
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.schedules import filling, passes_left
from fasop.costs.training import Training
from fasop.partition.class_bounds import Classes, in_parts, in_whole, largest, reach, suffix_min
from fasop.simulation.on_nodes import Nodes, exchanged_on, handing_out, times_on
from megatron_ext.contract.parallel_config import Recompute, Schedule


class Way(NamedTuple):
    """What of a plan, beside its sizes, decides how long its layers take."""

    schedule: Schedule
    chunks: int
    recompute: Recompute
    sharded: bool = False
    """Whether replicas share the optimizer."""


@dataclass(frozen=True, kw_only=True)
class _Alone:
    """What a plan takes beside its layers if all nodes are of one kind: seconds, by kind."""

    first: Floats
    """From the first stage's last backward pass until its gradients are summed, but for its layers'; and what any
    stage hands out of new weights."""
    sums: Floats
    """[layers + 1, kinds]: all gradients of a stage of so many layers."""
    last: Floats
    """The part of `sums` that the last bucket takes, which nothing hides."""
    handing: Floats
    """[layers + 1, kinds]: handing out the new weights of a stage of so many layers."""
    embedding: Floats

    def of(self, kinds: Sequence[int]) -> _Alone:
        return _Alone(
            first=self.first[kinds],
            sums=self.sums[:, kinds],
            last=self.last[kinds],
            handing=self.handing[:, kinds],
            embedding=self.embedding[kinds],
        )

    def or_less(self, other: _Alone, where: NDArray[np.bool_]) -> _Alone:
        """Return the less of both for the kinds `where` that may be, but for the embedding's."""
        parts = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        least = {name: np.where(where, np.minimum(own, others), own) for name, (own, others) in parts.items()}
        return _Alone(**(least | {"embedding": self.embedding}))

    @classmethod
    def nothing(cls, layers: int, kinds: int) -> _Alone:
        sizes = {"sums": (layers + 1, kinds), "handing": (layers + 1, kinds)}
        return cls(**{field.name: np.zeros(sizes.get(field.name, kinds)) for field in fields(cls)})


class _OnLinks(NamedTuple):
    """The seconds of a plan's messages and sums in `_Beside`."""

    hops: float
    around: float
    queue: float
    ending: float


class _Beside(NamedTuple):
    """What plans take beside their layers, at least; seconds, [plans] each."""

    hops: Floats
    """All messages from the first stage to the last."""
    around: Floats
    """The message from the last stage to the first."""
    queue: Floats
    """For how long a message occupies the link between two stages that is busiest."""
    embedding: Floats
    """Its forward pass, and the part of its backward pass that a micro-batch waits for."""
    head: Floats
    ending: Floats
    """From the first stage's last backward pass to the end of the iteration."""


class LowerBounds:
    """Bounds the times of plans of many sizes, on some nodes of these kinds. What does not depend on the numbers of
    plans and nodes is kept."""

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self._kinds = kinds
        self._names = [kind.name for kind in kinds]
        self._times: dict[tuple[int, int, int, int, Recompute], Sequence[LayerTimes]] = {}
        self._alone: dict[tuple[int, ...], _Alone] = {}
        self._alone_of_some: dict[tuple[int, ...], _Alone] = {}
        self._nodes: dict[tuple[int, int], Nodes] = {}
        self._links: dict[tuple[int, ...], _OnLinks] = {}
        self.sizes: dict[tuple[int, ...], Sequence[Training]] = {}
        """The plans of sets of nodes that have the same ones, by what decides which these are."""

    def of_work(self, plans: Sequence[Training], recompute: Sequence[Recompute], kinds: Sequence[NodeKind]) -> float:
        """Seconds below which none of these plans is with any schedule, order of the nodes or partition; infinite if
        there are none.

        Each GPU does its part of the work in the sizes in which it is fastest, and none of them waits.
        """
        if not plans:
            return np.inf
        sized = {self.size_of(one): one for one in plans}
        some, (ranks, _, _, batches) = self._some(kinds), np.array([*sized], float).T
        parts = [
            [self._of_kinds(one, way)[kind].layers for kind in some] for way in recompute for one in sized.values()
        ]
        times = np.array([[[part.forward + part.backward for part in layers] for layers in of] for of in parts])
        samples = np.tile(ranks / batches, len(recompute))[:, np.newaxis, np.newaxis]
        of_sample = (samples * times).min(axis=0)  # [kinds, kinds of layers]: seconds of a GPU
        units = of_sample.mean(axis=0)
        counted = units > 0
        if not counted.any():
            return 0.0
        slowest = (of_sample[:, counted] / units[counted]).min(axis=1)
        rates = np.array([kind.gpus * kind.group.count for kind in kinds]) / np.maximum(slowest, 1e-30)
        work = float(units @ plans[0].blocks.counts[:, -1])
        return float(plans[0].parallel.global_batch_size * work / rates.sum())

    @staticmethod
    def size_of(one: Training) -> tuple[int, int, int, int]:
        """Return what `of_work` depends on: the ranks that have a micro-batch, how many of these share sequences and
        experts, and its samples."""
        parallel = one.parallel
        return parallel.tensor_size * parallel.context, parallel.context, parallel.expert, parallel.micro_batch_size

    def of(self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind]) -> Floats:
        """[plans]: seconds below which no order of these nodes and no partition gets an iteration, proved.

        All `plans` go that way, and have sizes; `kinds` are some of the kinds, each with its number of nodes.
        """
        if not plans:
            return np.zeros(0)
        whole = plans[0].blocks.alike
        layers = plans[0].blocks.layers if whole else 1
        if whole:
            units, times = np.full(len(plans), float(layers)), self._layers(plans, way, kinds)
        else:
            units, times = self._units(plans, way, kinds)
        classes, beside = self._classes(plans, way, kinds, times, layers), self._beside(plans, way, kinds)
        count = np.array([_micro_batches(one, kinds) for one in plans])
        found = _least(classes, beside, count, way, units, whole=whole)
        mixed = np.nonzero([_has_heterogeneous_replicas(one, kinds) for one in plans])[0]
        if len(kinds) > 2 and len(mixed):
            some, its_own = classes.take(mixed), _Beside(*(seconds[mixed] for seconds in beside))
            found[mixed] = _of_mixed_replicas(some, its_own, count[mixed], way, units[mixed], whole=whole)
        return found

    def ending(self, one: Training, kinds: Sequence[NodeKind]) -> float:
        """Seconds from the first stage's last backward pass to the end of the iteration, at least, in whatever order of
        these nodes."""
        parallel = one.parallel
        way = Way(parallel.schedule, parallel.chunks, parallel.recompute, parallel.sharded_optimizer)
        return self._on_links(one, way, self._some(kinds), kinds).ending

    def _units(self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind]) -> tuple[Floats, Floats]:
        """[plans]: units of all layers; [plans, kinds, 2]: seconds of one, forward and backward, at least."""
        parts = [[self._of_kinds(one, way.recompute)[kind].layers for kind in self._some(kinds)] for one in plans]
        times = np.array(
            [[[(part.forward, part.backward) for part in layers] for layers in of_plan] for of_plan in parts]
        )
        units = times.sum(axis=3).mean(axis=1)
        return units @ plans[0].blocks.counts[:, -1], (times / units[:, np.newaxis, :, np.newaxis]).min(axis=2)

    def _layers(self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind]) -> Floats:
        """[plans, kinds, 2]: seconds of a layer, where all are alike, forward and backward."""
        parts = [[self._of_kinds(one, way.recompute)[kind].layer for kind in self._some(kinds)] for one in plans]
        return np.array([[(part.forward, part.backward) for part in of_plan] for of_plan in parts])

    def _classes(
        self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind], times: Floats, layers: int
    ) -> Classes:
        """`times` [plans, kinds, 2] are seconds of a layer, of which there are so many, or of a unit."""
        fastest = np.argsort(times.sum(axis=2), axis=1, kind="stable")
        forward, backward = np.take_along_axis(times, fastest[..., np.newaxis], axis=1).transpose(2, 0, 1)
        gpus = np.array([kind.gpus * kind.group.count for kind in kinds])[fastest]
        width = np.array([[one.parallel.tensor_size * one.parallel.data] for one in plans])
        most = max(one.parallel.pipeline for one in plans)
        sizes = [(one.parallel.pipeline, _micro_batches(one, kinds)) for one in plans]
        passes = np.array([_passes(way.schedule, way.chunks, *size, most) for size in sizes])
        ahead, back = passes.transpose(1, 0, 2, 3)[..., np.newaxis, :]
        left = ahead * forward[:, np.newaxis, :, np.newaxis] + back * backward[:, np.newaxis, :, np.newaxis]
        turn = np.array([[way.schedule.definition.in_turn(*size)] for size in sizes])
        then = np.array([_then(way.schedule, way.chunks, *size) for size in sizes])
        count = np.array([[[number]] for _, number in sizes])
        busy = count * (forward + backward)[..., np.newaxis] * np.arange(1.0, layers + 1)
        if plans[0].blocks.alike:
            exposed = self._exposed(plans, way, kinds, backward, fastest)
            for number in np.nonzero([_has_heterogeneous_replicas(one, kinds) for one in plans])[0]:
                exposed[number] = _of_any_stage(exposed[number], gpus[number], width[number, 0])
            busy = np.minimum.accumulate((busy + exposed)[..., ::-1], axis=2)[..., ::-1]
        return Classes(
            stages=np.diff(np.cumsum(gpus, axis=1) // width, axis=1, prepend=0),
            shares=gpus / width,
            trip=suffix_min(forward + way.schedule.definition.input_share * backward),
            both=forward + backward,
            left=suffix_min(left.min(axis=1)),
            turn=suffix_min((turn - 1) * backward),
            of_part=suffix_min(then[:, :1] * forward + (turn - 1 + then[:, 1:]) * backward),
            busy=suffix_min(busy),
            slowest=forward.max(axis=1) + way.schedule.definition.input_share * backward.max(axis=1),
        )

    def _exposed(
        self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind], backward: Floats, order: Integers
    ) -> Floats:
        """[plans, kinds, layers]: seconds of the sums of gradients that the last backward pass does not hide, and of
        handing out new weights, at least.

        `backward` are seconds of a layer, with the kinds in this order.
        """
        alone = [self._alone_on(one, way, kinds) for one in plans]
        sums, last, handing = (
            np.array([getattr(one, name).T for one in alone]) for name in ("sums", "last", "handing")
        )
        whole, handed = (np.take_along_axis(part, order[..., np.newaxis], axis=1)[..., 1:] for part in (sums, handing))
        if not plans[0].overlaps:
            return np.asarray(whole + handed)
        model = plans[0].model
        first = np.array([overlap.first_bucket_layers(model, one.parallel.tensor_size) for one in plans])
        after = np.arange(1.0, plans[0].blocks.layers + 1) - first[:, np.newaxis, np.newaxis]
        hidden = filling(way.schedule) * backward[..., np.newaxis] * after
        left = np.take_along_axis(last, order, axis=1)[..., np.newaxis]
        exposed: Floats = np.minimum(whole, np.maximum(whole - hidden, left)) + handed
        return exposed

    def _some(self, kinds: Sequence[NodeKind]) -> list[int]:
        return [self._names.index(kind.name) for kind in kinds]

    def _of_kinds(self, one: Training, recompute: Recompute) -> Sequence[LayerTimes]:
        parallel = one.parallel
        key = parallel.tensor_size, parallel.context, parallel.expert, parallel.micro_batch_size, recompute
        if key not in self._times:
            sized = replace(one, parallel=replace(parallel, recompute=recompute))
            self._times[key] = [times_on(kind, sized) for kind in self._kinds]
        return self._times[key]

    def _beside(self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind]) -> _Beside:
        some, rows = self._some(kinds), []
        for one in plans:
            times = [self._of_kinds(one, way.recompute)[kind] for kind in some]
            share = way.schedule.definition.input_share
            ends = [
                min(time.forward for time in part) + share * min(time.backward for time in part)
                for part in ([time.embedding for time in times], [time.head for time in times])
            ]
            rows.append((*self._on_links(one, way, some, kinds), *ends))
        hops, around, queue, ending, embedding, head = np.array(rows).T
        return _Beside(hops=hops, around=around, queue=queue, embedding=embedding, head=head, ending=ending)

    def _on_links(self, one: Training, way: Way, some: Sequence[int], kinds: Sequence[NodeKind]) -> _OnLinks:
        p, nodes = one.parallel, [kind.group.count for kind in kinds]
        sizes = p.tensor_size, p.data, p.context, p.expert, p.micro_batch_size
        key = way.sharded, *sizes, *some, *nodes
        if key not in self._links:
            self._links[key] = self._on_known_links(one, way, some, kinds)
        return self._links[key]

    def _on_known_links(self, one: Training, way: Way, some: Sequence[int], kinds: Sequence[NodeKind]) -> _OnLinks:
        p, nodes = one.parallel, [kind.group.count for kind in kinds]
        gpus, width = [kind.gpus for kind in kinds], p.tensor_size * p.data
        alone = self._alone_on(one, way, kinds)
        first = float(_of_any_stage(alone.first, np.multiply(nodes, gpus), width))
        if len({*gpus}) > 1:
            hops, around, queue = self._between_nodes(one, some, kinds)
            embedding = alone.embedding.min() if p.pipeline > 1 else 0.0
            return _OnLinks(hops, around, queue, first + embedding)
        # As `exchanged_on` has them: [stages, kinds].
        link = self._nodes_of_one_kind(sum(nodes), gpus[0]).links_of(one).hops.link
        size = float(min(one.messages))
        passing, busy = (part[:, some] for part in (link.takes(np.array(size)), size * link.s_per_byte))
        if gpus[0] % width and width % gpus[0]:  # stages lie on parts of nodes, whose links they share with few others
            hops, around, queue = self._between_nodes(one, some, kinds)
            hops, around = max(hops, passing[:-1].min(axis=1).sum()), max(around, passing[-1].min())
            return _OnLinks(hops, around, queue, first + alone.embedding.min())
        ends = sorted(zip(alone.embedding.tolist(), nodes, strict=True))
        first_and_last, fast = 2 * max(width, gpus[0]), 0
        embedding = ends[0][0]
        for seconds, number in ends if p.world_size >= first_and_last else ():
            embedding = seconds
            fast += number * gpus[0]
            if fast >= first_and_last:
                break
        last_of_node = max(1, gpus[0] // width) - 1
        occupied = np.minimum(busy, passing)[last_of_node : -1 : last_of_node + 1]
        queue = float(occupied.min(axis=0).max()) if len(occupied) else 0.0  # every node sends to another one
        return _OnLinks(_through(passing, width, gpus[0], nodes), passing[-1].min(), queue, first + embedding)

    def _between_nodes(
        self, one: Training, some: Sequence[int], kinds: Sequence[NodeKind]
    ) -> tuple[float, float, float]:
        """`hops`, `around` and `queue` of the messages from node to node, of which there are so many in any order, if
        each has a link to itself."""
        p = one.parallel
        if p.pipeline == 1 or p.context > 1 or any(kind.collectives is not None for kind in kinds):
            return 0.0, 0.0, 0.0
        apart = replace(one, parallel=replace(p, data=1, expert=1, pipeline=2, shares=None))
        link = self._nodes_of_one_kind(2, p.tensor_size).links_of(apart).hops.link
        size = float(min(one.messages))
        hop, busy = (part[0, some] for part in (link.takes(np.array(size)), size * link.s_per_byte))
        width, slowest_first = p.tensor_size * p.data, np.argsort(-hop, kind="stable")
        nodes, gpus = np.array([(kind.group.count, kind.gpus) for kind in kinds])[slowest_first].T
        # A node has messages within it from all its whole stages but the last; all others leave a node or enter one,
        # at least one of each node.
        within = np.cumsum(nodes * np.maximum(0, gpus // width - 1))
        touching = -(-np.cumsum(nodes * gpus) // width) - 1 - within
        seconds = hop[slowest_first]
        total = float(np.maximum(1, touching) @ (seconds - np.append(seconds[1:], 0.0)))
        return total, float(hop.min()), float(np.minimum(busy, hop).max())

    def _alone_on(self, one: Training, way: Way, kinds: Sequence[NodeKind]) -> _Alone:
        p, some = one.parallel, self._some(kinds)
        sizes = p.tensor_size, p.data, p.world_size, p.context, p.expert
        key = way.sharded, *sizes, *some, *(kind.group.count for kind in kinds)
        if key not in self._alone_of_some:
            self._alone_of_some[key] = self._find_alone(one, way, kinds)
        return self._alone_of_some[key]

    def _find_alone(self, one: Training, way: Way, kinds: Sequence[NodeKind]) -> _Alone:
        """What the plan takes beside its layers, by these kinds.

        Where nodes differ in GPUs, it is of a stage that lies in a node if there is room for it, and else of one whose
        tensor groups lie on a node each.
        """
        p, some = one.parallel, self._some(kinds)
        gpus = np.array([kind.gpus for kind in kinds])
        if len({*gpus.tolist()}) == 1:
            return self._of_one_kind(one, way, sum(kind.group.count for kind in kinds), int(gpus[0])).of(some)
        if one.reduces_by_node or p.context > 1 or any(kind.collectives is not None for kind in kinds):
            return _Alone.nothing(one.blocks.layers, len(kinds))
        apart = self._of_one_kind(one, way, p.world_size // p.tensor_size, p.tensor_size).of(some)
        together = self._of_one_kind(one, way, 1, p.world_size).of(some)
        return apart.or_less(together, gpus >= p.tensor_size * p.data)

    def _of_one_kind(self, one: Training, way: Way, nodes: int, gpus: int) -> _Alone:
        p = one.parallel
        key = way.sharded, nodes, gpus, p.tensor_size, p.data, p.context, p.expert
        if key not in self._alone:
            if p.sharded_optimizer != way.sharded:
                one = replace(one, parallel=replace(p, sharded_optimizer=way.sharded))
            every = self._nodes_of_one_kind(nodes, gpus)
            exchanged, handing = exchanged_on(one, every), handing_out(one, every)
            sums, last = exchanged.sums, exchanged.last
            amount = np.arange(one.blocks.layers + 1.0).reshape(-1, 1, 1)
            of_layers = [part.of(amount).min(axis=1) if one.blocks.alike else part.fixed for part in (sums, handing)]
            self._alone[key] = _Alone(
                first=exchanged.least_exposed[0] + handing.fixed.min(axis=0),
                sums=of_layers[0],
                last=np.zeros(len(self._kinds)) if last is None else last.min(axis=0),
                handing=of_layers[1],
                embedding=exchanged.embedding,
            )
        return self._alone[key]

    def _nodes_of_one_kind(self, nodes: int, gpus: int) -> Nodes:
        """So many with so many GPUs each, an order for each kind."""
        if (nodes, gpus) not in self._nodes:
            alike = [kind if kind.gpus == gpus else replace(kind, gpus=gpus) for kind in self._kinds]
            orders = np.repeat(np.arange(len(alike))[:, np.newaxis], nodes, axis=1)
            self._nodes[nodes, gpus] = Nodes(alike, orders, least=True)
        return self._nodes[nodes, gpus]


def _of_any_stage(seconds: Floats, gpus: Integers, width: int) -> Floats:
    """What any stage takes at least, of so many GPUs: the slowest of its kinds counts, and those that take less have no
    more GPUs than that. `seconds` are [kinds, …], and `gpus` those of each kind."""
    order = np.argsort(seconds, axis=0, kind="stable")
    enough = np.argmax(np.cumsum(gpus[order], axis=0) >= width, axis=0)
    slowest = np.take_along_axis(order, enough[np.newaxis], axis=0)
    found: Floats = np.take_along_axis(seconds, slowest, axis=0)[0]
    return found


def _has_heterogeneous_replicas(one: Training, kinds: Sequence[NodeKind]) -> bool:
    """Whether some order of the nodes may give replicas different GPUs in a stage."""
    parallel = one.parallel
    width = parallel.tensor_size * parallel.data
    return len(kinds) > 1 and parallel.data > 1 and any(kind.gpus % width for kind in kinds)


def _micro_batches(one: Training, kinds: Sequence[NodeKind]) -> int:
    """Micro-batches of every replica, at least. Where all have the same GPUs, those with the most take longest."""
    parallel = one.parallel
    if parallel.shares is None or not _has_heterogeneous_replicas(one, kinds):
        return parallel.micro_batches
    return parallel.global_batch_size // parallel.micro_batch_size // (parallel.data // parallel.context)


def _least(classes: Classes, beside: _Beside, count: Integers, way: Way, units: Floats, *, whole: bool) -> Floats:
    """[plans]: seconds of an iteration, at least.

    Where layers differ (not `whole`), they are taken for amounts of work, which need not be whole numbers
    (`fasop.partition.heterogeneous_layers`); nor need stages be.
    """
    layers = classes.busy.shape[2]
    messages = 2 * (way.chunks * beside.hops + (way.chunks - 1) * beside.around)
    passes = in_parts(classes.stages, classes.trip, classes.left, units)
    parts = way.chunks * classes.stages
    if way.schedule.definition.has_chunks:
        passes = np.maximum(passes, in_parts(parts, classes.trip, classes.of_part[..., np.newaxis], units))
    if whole:
        passes = np.maximum(passes, in_whole(classes.stages, classes.trip, classes.left.min(axis=2), layers))
    if whole and way.schedule.definition.has_chunks:
        passes = np.maximum(passes, in_whole(parts, classes.trip, classes.turn, layers))
    least: Floats = messages + beside.embedding + beside.head + passes + beside.ending
    if way.chunks > 1:
        queue = 2 * beside.hops + (way.chunks * count - 1) * beside.queue
    else:
        queue = messages + beside.embedding + beside.head + units * classes.trip[:, 0] + (count - 1) * beside.queue
    least = np.maximum(least, queue + beside.ending)
    if whole:
        least = np.maximum(least, largest(classes.stages, classes.busy, layers))
    if not way.schedule.definition.splits_backward:
        if whole:
            each = classes.both[..., np.newaxis] * np.arange(1.0, layers + 1)
            even = largest(classes.stages, each, layers)
        else:
            even = units / (classes.stages / classes.both).sum(axis=1)
        least = np.maximum(least, count * even + beside.ending)
    if not way.schedule.definition.has_chunks:
        fixed = (beside.embedding + beside.head) / classes.slowest
        least = np.maximum(least, beside.ending + (units + fixed) / reach(classes, count))
    return least


def _of_mixed_replicas(
    classes: Classes, beside: _Beside, count: Integers, way: Way, units: Floats, *, whole: bool
) -> Floats:
    """[plans]: as `_least`, where the GPUs of a stage may be of three or more kinds.

    The largest bound counts: for each number of fastest kinds, as if these were one kind and the others another one;
    and for the mean of all replicas, whose stages need not be whole numbers.
    """
    bounds = [
        _least(classes.in_two(kind), beside, count, way, units, whole=whole)
        for kind in range(1, classes.stages.shape[1])
    ]
    of_mean = replace(classes, stages=classes.shares)
    found: Floats = np.max([*bounds, _least(of_mean, beside, count, way, units, whole=False)], axis=0)
    return found


@lru_cache(maxsize=4096)
def _passes(schedule: Schedule, chunks: int, stages: int, micro_batches: int, places: int) -> Floats:
    """[2, chunks, places]: forward and backward passes left; without end in the places behind the last stage."""
    left = passes_left(schedule, stages, chunks, micro_batches)
    found = np.full((2, len(left.forward), places), np.inf)
    found[..., :stages] = left.forward, left.backward
    return found


@lru_cache(maxsize=4096)
def _then(schedule: Schedule, chunks: int, stages: int, micro_batches: int) -> tuple[float, float]:
    """Forward and backward passes of all chunks that any stage has left after those in turn, if each chunk has as few
    as any."""
    left = passes_left(schedule, stages, chunks, micro_batches, schedule.definition.in_turn(stages, micro_batches))
    return chunks * float(left.forward.min()), chunks * float(left.backward.min())


def _through(hops: Floats, width: int, gpus: int, nodes: Sequence[int]) -> float:
    """Seconds of messages from the first stage to the last, at least; `hops` are [stages, kinds], if alone. Nodes have
    whole stages, or stages whole nodes.

    A message between nodes is as slow as the slower one: of n nodes in a row, j slow ones have j slow links beside
    them, but for the last. Likewise of stages that have whole nodes.
    """
    if len(hops) == 1:
        return 0.0
    inside = max(1, gpus // width)
    between, within = hops[inside - 1 : -1 : inside], hops[: inside - 1]
    total = float(within.sum(axis=0) @ np.array(nodes))
    if not len(between):
        return total
    together, seen, units = max(1, width // gpus), 0, 0
    seconds, last = between.min(axis=0), 0.0
    for kind in np.argsort(-seconds, kind="stable"):
        seen += nodes[kind]
        slow = -(-seen // together)
        if slow > units:
            total += (slow - units) * seconds[kind]
            last, units = seconds[kind], slow
    return float(total - last)
