"""Times that no plan of given sizes beats, in whatever order the nodes come: known before any stage is laid on a node.

A replica has a part of every stage. If GPUs, sorted by speed, share stages in that order, the j fastest stages are as
fast as they can be in any order of the nodes, for every j, where each stage lies in one node. Where replicas may lie on
different kinds of nodes, that holds for the fastest kinds together, for at least one replica, and for the mean of all
replicas. The chains of waits are those of `fasop.partition.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import overlap
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.parallelism import Numbers, Parallelism
from fasop.costs.schedules import filling, passes_left
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.sizes import kind_parameters
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.partition.class_bounds import Classes, in_parts, in_whole, largest, reach, suffix_min
from fasop.partition.local_search import Worth
from fasop.search.least_exchange import LinkBounds, of_any_stage
from fasop.simulation.linear import TINY
from fasop.simulation.nodes import Nodes, step_s_per_parameter, times_on
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import Recompute, Schedule


class Way(NamedTuple):
    """What of a plan, beside its sizes, decides how long its layers take."""

    schedule: Schedule
    chunks: int
    recompute: Recompute

    @classmethod
    def of(cls, parallel: Parallelism) -> Way:
        return cls(parallel.schedule, parallel.chunks, parallel.recompute)


class _Beside(NamedTuple):
    """What plans take beside their layers, at least; seconds, [plans] each. The first four are of `OnLinks`."""

    hops: Floats
    around: Floats
    queue: Floats
    ending: Floats
    embedding: Floats
    """Its forward pass, and the part of its backward pass that a micro-batch waits for."""
    head: Floats
    one_way: Floats
    """A layer's forward or its backward pass, the longer one, on whichever kind it is shortest."""

    def take(self, plans: Integers) -> _Beside:
        return _Beside(*(seconds[plans] for seconds in self))

    def trip(self, chunks: int) -> Floats:
        """[plans]: of the first micro-batch, through all parts and back."""
        messages = 2 * (chunks * self.hops + (chunks - 1) * self.around)
        return np.asarray(messages + self.embedding + self.head)


class _Times(NamedTuple):
    every: Sequence[LayerTimes]
    """On some kinds of nodes."""
    seconds: Floats
    """[3, kinds, 2]: of embedding, head and the first kind of layer, forward and backward."""


class LowerBounds:
    """Bounds the times of plans of many sizes, on some nodes of these kinds. What does not depend on the numbers of
    plans and nodes is kept."""

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self._kinds = kinds
        self._on_links = LinkBounds(kinds)
        self._times: dict[tuple[tuple[int, ...], Recompute, int, int, int, int], _Times] = {}
        self.sizes: dict[tuple[int, ...], Sequence[Training]] = {}
        """The plans of sets of nodes that have the same ones, by what decides which these are."""
        self.cuts: dict[tuple[int, ...], list[tuple[int, Schedule, int]]] = {}
        """The numbers of those that can have a schedule, with each schedule and number of chunks, by the same."""
        self.options: dict[tuple[tuple[int, ...], tuple[int, Schedule, int]], list[Training]] = {}
        """The options of each of these."""
        self.pipelines: dict[tuple[Nodes, Parallelism], Pipelines] = {}
        """What was built of them last."""

    def of_work(self, plans: Sequence[Training], recompute: Sequence[Recompute], kinds: Sequence[NodeKind]) -> float:
        """Seconds below which none of these plans is with any schedule, order of the nodes or partition; infinite if
        there are none.

        Each GPU updates its part of the layers' parameters, does its part of the work in the sizes in which it is
        fastest, and never waits.
        """
        return float(self._of_work(plans, recompute, kinds, together=True)[0]) if plans else np.inf

    def of_each_work(
        self, plans: Sequence[Training], recompute: Sequence[Recompute], kinds: Sequence[NodeKind]
    ) -> Floats:
        """[plans]: the same of each by itself."""
        places = {size: place for place, size in enumerate(dict.fromkeys(map(self.size_of, plans)))}
        found = self._of_work(plans, recompute, kinds, together=False) if plans else np.zeros(0)
        return found[[places[self.size_of(one)] for one in plans]]

    def _of_work(
        self, plans: Sequence[Training], recompute: Sequence[Recompute], kinds: Sequence[NodeKind], *, together: bool
    ) -> Floats:
        """[sizes]: what `of_work` says of plans of each size, in the order of their first plans; [1]: of all."""
        sized, some = {self.size_of(one): one for one in plans}, self._on_links.some(kinds)
        ranks, _, _, batches = np.array([*sized], float).T
        ways = quickest(recompute)
        known = [self._of_kinds(one, way, some).every for way in ways for one in sized.values()]
        parts = [[time.layers for time in every] for every in known]
        times = np.array([[[part.forward + part.backward for part in layers] for layers in of] for of in parts])
        samples = np.tile(ranks / batches, len(ways))[:, np.newaxis, np.newaxis]
        # [sizes, kinds, kinds of layers]: seconds of a GPU for a sample
        of_sample = (samples * times).reshape(len(ways), len(sized), *times.shape[1:]).min(axis=0)
        counts, tensors = plans[0].blocks.counts[:, -1], [one.parallel.tensor_size for one in sized.values()]
        of_tensor = {t: t * np.dot(kind_parameters(plans[0].model, t, own_word=False), counts) for t in {*tensors}}
        parameters = np.array([of_tensor[tensor] for tensor in tensors])
        if together:
            of_sample, parameters = of_sample.min(axis=0, keepdims=True), parameters.min(keepdims=True)
        units = of_sample.mean(axis=1)
        counted = (units > 0)[:, np.newaxis]
        of_unit = of_sample / np.where(counted, units[:, np.newaxis], 1.0)
        slowest = np.where(counted, of_unit, np.inf).min(axis=2)
        rates = np.array([kind.gpus * kind.group.count for kind in kinds]) / np.maximum(slowest, 1e-30)
        work = plans[0].parallel.global_batch_size * (units @ counts)
        # Of the sizes some may step the weights themselves, which offload the least, as all do that share nothing.
        alone = replace(plans[0], parallel=replace(plans[0].parallel, sharded_optimizer=False))
        steps = [step_s_per_parameter(kind, alone) for kind in kinds]
        # Of each GPU: its rate times its seconds is at least its work and its rate times its update.
        updates = parameters * (steps / np.maximum(slowest, 1e-30)).min(axis=1)
        return np.asarray((work + updates) / np.maximum(rates.sum(axis=1), 1e-30))

    def of_rounds(self, plans: Sequence[Training], kinds: Sequence[NodeKind]) -> Floats:
        """[plans]: seconds below which none is, by what replicas exchange for every micro-batch; 0 where nothing.

        Sums of gradients fall behind the passes of all micro-batches but one by what these do not hide, and gathers of
        weights those of all (`fasop.simulation.linear.Hidden.behind`). So a stage takes at least as long as all of its
        exchanges. Together, stages exchange what all layers have; those that exchange it fastest lie on the fastest
        kinds alone.
        """
        found, some = np.zeros(len(plans)), self._on_links.some(kinds)
        every = self._on_links.alone_on(plans, [kinds] * len(plans))
        for number, (one, alone) in enumerate(zip(plans, every, strict=True)):
            parallel, times = one.parallel, self._of_kinds(one, Recompute.none, some).every
            if not alone.round_s.any() or (_has_heterogeneous_replicas(one, kinds) and not _in_order(times)):
                continue
            count, passes = parallel.micro_batches - (not one.gathers), not one.gathers and parallel.shares is None
            both = np.array([[part.forward + part.backward for part in time.layers] for time in times])
            taken = passes * both + count * np.outer(alone.round_s, layer_numbers(one).summed)
            units = taken.mean(axis=0)
            of_unit = (taken / np.maximum(units, TINY)).min(axis=1)
            fastest = np.argsort(of_unit, kind="stable")
            gpus = np.cumsum([kinds[kind].gpus * kinds[kind].group.count for kind in fastest])
            stages = np.diff(gpus // (parallel.tensor_size * parallel.data), prepend=0)
            rate = (stages / np.maximum(of_unit[fastest], TINY)).sum()
            found[number] = units @ one.blocks.counts[:, -1] / rate
        return found

    @staticmethod
    def size_of(one: Training) -> tuple[int, int, int, int]:
        """Return what `of_work` depends on: the ranks that have a micro-batch, how many of these share sequences and
        experts, and its samples."""
        parallel = one.parallel
        return parallel.tensor_size * parallel.context, parallel.context, parallel.expert, parallel.micro_batch_size

    def of(self, plans: Sequence[Training], way: Way, kinds: Sequence[NodeKind], worth: Worth | None = None) -> Floats:
        """[plans]: seconds below which no order of these nodes and no partition gets an iteration, proved.

        All `plans` go that way, and have sizes and say whether replicas share the optimizer; `kinds` are some of the
        kinds, each with its number of nodes. Bounds that are of no `worth` need not be the closest.
        """
        return self.of_sets(plans, way, [kinds] * len(plans), worth)

    def of_sets(
        self,
        plans: Sequence[Training],
        way: Way,
        sets: Sequence[Sequence[NodeKind]],
        worth: Worth | None = None,
    ) -> Floats:
        """Do as `of`, of each plan on its own set of nodes; all of these have nodes of the same kinds.

        First what passes take alone, which leaves out most, then what plans exchange besides, and last what whole
        layers take, if they are alike.
        """
        if not plans:
            return np.zeros(0)
        kinds, whole, every = sets[0], plans[0].blocks.alike, np.ones(len(plans), bool)
        some, layers = self._on_links.some(kinds), plans[0].blocks.layers if whole else 1
        seconds = np.array([self._of_kinds(one, way.recompute, some).seconds for one in plans])
        if whole:
            units, times = np.full(len(plans), float(layers)), seconds[:, 2]
        else:
            units, times = self._units(plans, way, some)
        count, replicas = np.array([_micro_batches(one, kinds) for one in plans]).T
        mixed = np.array([_has_heterogeneous_replicas(one, kinds) for one in plans])
        unlike = mixed & (len(kinds) > 2)  # of which classes in twos say something alone
        gpus = _gpus_of(sets)
        classes = self._classes(plans, way, kinds, times, seconds[:, 1], (count, replicas), mixed, gpus)
        found = np.where(unlike, 0.0, _ends(way, seconds).sum(axis=1) + _in_parts(classes, way, units))
        closer = np.nonzero(every if worth is None else worth(found))[0]
        if not len(closer):
            return found
        plans, sets = [plans[number] for number in closer.tolist()], [sets[number] for number in closer.tolist()]
        count, mixed, unlike = count[closer], mixed[closer], unlike[closer]
        units, seconds, times = units[closer], seconds[closer], times[closer]
        gpus, classes = gpus[closer], classes.take(closer)
        beside = self._beside(plans, way, sets, seconds, times)
        least = _least(classes, beside, count, way, units)
        if unlike.any():
            some_of = np.nonzero(unlike)[0]
            least[some_of] = _of_mixed_replicas(
                classes.take(some_of), beside.take(some_of), count[some_of], way, units[some_of]
            )
        found[closer] = np.maximum(found[closer], least)
        best = np.nonzero((every if worth is None else worth(found))[closer])[0]
        if whole and len(best):
            plans, sets = [plans[number] for number in best.tolist()], [sets[number] for number in best.tolist()]
            count, mixed, unlike, base = count[best], mixed[best], unlike[best], beside.take(best)
            busy = self._busy(plans, way, sets, times[best], count, mixed, gpus[best])
            its_own = replace(classes.take(best), busy=busy)
            least = _least_in_whole(its_own, base, count, way, layers)
            if unlike.any():
                some_of = np.nonzero(unlike)[0]
                base, count = base.take(some_of), count[some_of]
                twos = its_own.take(some_of).in_twos
                least[some_of] = np.max([_least_in_whole(two, base, count, way, layers) for two in twos], axis=0)
            found[closer[best]] = np.maximum(found[closer[best]], least)
        return found

    def ending(self, one: Training, kinds: Sequence[NodeKind]) -> float:
        """Seconds from the first stage's last backward pass to the end of the iteration, at least, in whatever order of
        these nodes."""
        return self._on_links.of([one], [kinds])[0].ending

    def _units(self, plans: Sequence[Training], way: Way, some: Sequence[int]) -> tuple[Floats, Floats]:
        """[plans]: units of all layers; [plans, kinds, 2]: seconds of one, forward and backward, at least."""
        parts = [[time.layers for time in self._of_kinds(one, way.recompute, some).every] for one in plans]
        times = np.array(
            [[[(part.forward, part.backward) for part in layers] for layers in of_plan] for of_plan in parts]
        )
        units = times.sum(axis=3).mean(axis=1)
        return units @ plans[0].blocks.counts[:, -1], (times / units[:, np.newaxis, :, np.newaxis]).min(axis=2)

    def _classes(
        self,
        plans: Sequence[Training],
        way: Way,
        kinds: Sequence[NodeKind],
        times: Floats,
        head: Floats,
        counts: tuple[Integers, Integers],
        mixed: NDArray[np.bool_],
        gpus: Integers,
    ) -> Classes:
        """`times` [plans, kinds, 2] are seconds of a layer, or of a unit where layers differ, `head` those of the head,
        `counts` [plans] the micro-batches of some replicas, and of how many, `mixed` whether replicas of each plan may
        lie on unlike GPUs, and `gpus` [plans, kinds] how many there are. What sums take is left out of `busy`."""
        fastest, forward, backward = _fastest_first(times)
        gpus = np.take_along_axis(gpus, fastest, axis=1)
        tensor, pipeline = np.array([(one.parallel.tensor_size, one.parallel.pipeline) for one in plans]).T
        most, (count, replicas) = pipeline.max(), counts
        sizes = [*zip(pipeline.tolist(), count.tolist(), strict=True)]
        passes = _stacked([_passes(way.schedule, way.chunks, *size, most) for size in sizes])
        ahead, back = passes.transpose(1, 0, 2, 3)[..., np.newaxis, :]
        left = ahead * forward[:, np.newaxis, :, np.newaxis] + back * backward[:, np.newaxis, :, np.newaxis]
        every = np.arange(len(plans))
        last = passes[every, :, -1, pipeline - 1]
        heads = np.take_along_axis((last[:, np.newaxis] * head).sum(axis=2), fastest, axis=1)
        turn = np.array([[way.schedule.definition.in_turn(*size)] for size in sizes])
        then = np.array([_then(way.schedule, way.chunks, *size) for size in sizes])
        shares = np.cumsum(gpus, axis=1) / (tensor * replicas)[:, np.newaxis]
        if len({kind.gpus for kind in kinds}) == 1:
            for row in np.nonzero(mixed)[0].tolist():
                if plans[row].parallel.shares is not None:
                    parallel, nodes = plans[row].parallel, np.cumsum(gpus[row]) // kinds[0].gpus
                    groups = kinds[0].gpus // parallel.tensor_size
                    shares[row] = _most_stages(parallel.micro_batches_of, parallel.pipeline, groups)[nodes]
        shares = np.minimum(shares, pipeline[:, np.newaxis])
        return Classes(
            stages=np.diff(shares.astype(np.int64), axis=1, prepend=0),
            shares=np.diff(shares, axis=1, prepend=0),
            trip=suffix_min(forward + way.schedule.definition.input_share * backward),
            both=forward + backward,
            left=suffix_min(left.min(axis=1)),
            turn=suffix_min((turn - 1) * backward),
            of_part=suffix_min(then[:, :1] * forward + (turn - 1 + then[:, 1:]) * backward),
            busy=suffix_min(count[:, np.newaxis, np.newaxis] * (forward + backward)[..., np.newaxis]),
            head=suffix_min(heads),
            of_last=suffix_min(left.min(axis=1)[every, :, pipeline - 1]),
            slowest=forward.max(axis=1) + way.schedule.definition.input_share * backward.max(axis=1),
        )

    def _busy(
        self,
        plans: Sequence[Training],
        way: Way,
        sets: Sequence[Sequence[NodeKind]],
        times: Floats,
        count: Integers,
        mixed: NDArray[np.bool_],
        gpus: Integers,
    ) -> Floats:
        """`Classes.busy` of plans whose layers are alike, with sums; the arguments are those of `_classes`."""
        fastest, forward, backward = _fastest_first(times)
        exposed = self._exposed(plans, way, sets, backward, fastest, mixed, gpus)
        layers = np.arange(1.0, plans[0].blocks.layers + 1)
        busy = count[:, np.newaxis, np.newaxis] * (forward + backward)[..., np.newaxis] * layers + exposed
        return suffix_min(np.minimum.accumulate(busy[..., ::-1], axis=2)[..., ::-1])

    def _exposed(
        self,
        plans: Sequence[Training],
        way: Way,
        sets: Sequence[Sequence[NodeKind]],
        backward: Floats,
        order: Integers,
        mixed: NDArray[np.bool_],
        gpus: Integers,
    ) -> Floats:
        """[plans, kinds, layers]: seconds of the sums of gradients that the last backward pass does not hide, and of
        handing out new weights, at least, of a stage whose slowest GPUs are of this kind.

        `backward` are seconds of a layer, with the kinds in this order. Of stages on unlike GPUs the slowest link
        counts, and the slowest backward pass hides: with unlike shares that of any kind, since the replica with the
        most micro-batches need not have it.
        """
        alone = self._on_links.alone_on(plans, sets)
        sums, last, handing = (_stacked([getattr(one, name) for one in alone]) for name in ("sums", "last", "handing"))
        sums, handing = sums.transpose(0, 2, 1), handing.transpose(0, 2, 1)
        whole, handed = (np.take_along_axis(part, order[..., np.newaxis], axis=1)[..., 1:] for part in (sums, handing))
        left = np.take_along_axis(last, order, axis=1)[..., np.newaxis]
        if mixed.any():
            width = np.array([one.parallel.tensor_size * one.parallel.data for one in plans])[mixed]
            held = np.take_along_axis(gpus, order, axis=1)[mixed]
            for part in (whole, handed, left):
                part[mixed] = of_any_stage(part[mixed], held, width)[:, np.newaxis]
            shared = np.array([one.parallel.shares is not None for one in plans])[:, np.newaxis]
            slowest = np.where(shared, backward.max(axis=1, keepdims=True), np.maximum.accumulate(backward, axis=1))
            backward = np.where(mixed[:, np.newaxis], slowest, backward)
        if not plans[0].overlaps:
            return np.asarray(whole + handed)
        model = plans[0].model
        tensors = [one.parallel.tensor_size for one in plans]
        buckets = {tensor: overlap.first_bucket_layers(model, tensor) for tensor in {*tensors}}
        first = np.array([buckets[tensor] for tensor in tensors])
        after = np.arange(1.0, plans[0].blocks.layers + 1) - first[:, np.newaxis, np.newaxis]
        hidden = filling(way.schedule) * backward[..., np.newaxis] * after
        return np.minimum(whole, np.maximum(whole - hidden, left)) + handed

    def _of_kinds(self, one: Training, recompute: Recompute, some: Sequence[int]) -> _Times:
        """Kinds that are not asked for may have no costs for this tensor size."""
        parallel = one.parallel
        sizes = parallel.tensor_size, parallel.context, parallel.expert, parallel.micro_batch_size
        key = tuple(some), recompute, *sizes
        if key not in self._times:
            alike = parallel.recompute == recompute
            sized = one if alike else replace(one, parallel=replace(parallel, recompute=recompute))
            every = [times_on(self._kinds[kind], sized) for kind in some]
            parts = [[getattr(time, name) for time in every] for name in ("embedding", "head", "layer")]
            seconds = [[(time.forward, time.backward) for time in of_kinds] for of_kinds in parts]
            self._times[key] = _Times(every, np.array(seconds))
        return self._times[key]

    def _beside(
        self,
        plans: Sequence[Training],
        way: Way,
        sets: Sequence[Sequence[NodeKind]],
        seconds: Floats,
        times: Floats,
    ) -> _Beside:
        """`seconds` are `_Times.seconds` of the plans, on these kinds; for `times` see `_classes`."""
        one_way = times.min(axis=1).max(axis=1)
        return _Beside(*np.array(self._on_links.of(plans, sets)).T, *np.column_stack([_ends(way, seconds), one_way]).T)


def quickest(recompute: Sequence[Recompute]) -> Sequence[Recompute]:
    """Those of which plans take the least: to compute layers again takes no less than to compute none again."""
    return (Recompute.none,) if Recompute.none in recompute else recompute


def _ends(way: Way, seconds: Floats) -> Floats:
    """[plans, 2]: `_Beside.embedding` and `_Beside.head`; for `seconds` see `_Times`."""
    forward, backward = np.moveaxis(seconds[:, :2].min(axis=2), 2, 0)
    return np.asarray(forward + way.schedule.definition.input_share * backward)


def _gpus_of(sets: Sequence[Sequence[NodeKind]]) -> Integers:
    """[sets, kinds]"""
    known = {id(kinds): [kind.gpus * kind.group.count for kind in kinds] for kinds in sets}
    return np.array([known[id(kinds)] for kinds in sets])


def _fastest_first(times: Floats) -> tuple[Integers, Floats, Floats]:
    """[plans, kinds]: the kinds by the seconds of a layer, and what forward and backward passes take on them."""
    fastest = np.argsort(times.sum(axis=2), axis=1, kind="stable")
    forward, backward = np.take_along_axis(times, fastest[..., np.newaxis], axis=1).transpose(2, 0, 1)
    return fastest, forward, backward


def _stacked(every: Sequence[Floats]) -> Floats:
    """Stack arrays, of which many are the same object, on a new first axis."""
    distinct = {id(one): one for one in every}
    place = {number: at for at, number in enumerate(distinct)}
    return np.stack([*distinct.values()])[[place[id(one)] for one in every]]


def _in_order(times: Sequence[LayerTimes]) -> bool:
    """Whether a kind that is slower than another one in any pass of any part of the model is so in all of them."""
    parts = [[time.embedding, *time.layers, time.head] for time in times]
    passes = np.array([[seconds for part in of for seconds in (part.forward, part.backward)] for of in parts])
    return bool((np.diff(passes[np.lexsort(passes.T)], axis=0) >= 0).all())


def _has_heterogeneous_replicas(one: Training, kinds: Sequence[NodeKind]) -> bool:
    """Whether some order of the nodes may give replicas different GPUs in a stage."""
    parallel = one.parallel
    width = parallel.tensor_size * parallel.data
    return len(kinds) > 1 and parallel.data > 1 and any(kind.gpus % width for kind in kinds)


def _micro_batches(one: Training, kinds: Sequence[NodeKind]) -> tuple[int, int]:
    """Micro-batches of some replicas, and how many of these there are: all with the least number, or those with the
    most, of which one has few fast GPUs if there are many. Where all have the same GPUs, the most take longest."""
    parallel = one.parallel
    if parallel.shares is None or not _has_heterogeneous_replicas(one, kinds):
        return parallel.micro_batches, parallel.data
    counts = parallel.micro_batches_of
    most = counts.count(max(counts))
    of_most = len({kind.gpus for kind in kinds}) == 1 or 2 * most > len(counts)
    return (max(counts), most) if of_most else (min(counts), parallel.data)


@lru_cache(maxsize=4096)
def _most_stages(micro_batches: Numbers, stages: int, groups: int) -> Floats:
    """[nodes + 1]: how many stages the replicas with the most micro-batches have on so many nodes with so many tensor
    groups each, at most, on the mean of these replicas, wherever the nodes are."""
    most = np.array(micro_batches) == max(micro_batches)
    of_nodes = np.tile(most, stages).reshape(-1, groups).sum(axis=1)
    return np.cumsum([0, *np.sort(of_nodes)[::-1]]) / most.sum()


def _least(classes: Classes, beside: _Beside, count: Integers, way: Way, units: Floats) -> Floats:
    """[plans]: seconds of an iteration, at least.

    Layers are taken for amounts of work, which need not be whole numbers (where layers differ as in
    `fasop.partition.heterogeneous_layers`); nor need stages be.
    """
    trip = beside.trip(way.chunks)
    least: Floats = trip + _in_parts(classes, way, units) + beside.ending
    if way.chunks > 1:
        messages = (way.chunks + 1) * beside.hops + (way.chunks - 1) * beside.around
        trip = messages + beside.embedding + beside.head + units * beside.one_way
    else:
        trip = trip + units * classes.trip[:, 0]
    queue = trip + (way.chunks * count - 1) * beside.queue
    least = np.maximum(least, queue + beside.ending)
    if not way.schedule.definition.splits_backward:
        even = units / (classes.stages / classes.both).sum(axis=1)
        least = np.maximum(least, count * even + beside.ending)
    if not way.schedule.definition.has_chunks:
        fixed = (beside.embedding + beside.head) / classes.slowest
        least = np.maximum(least, beside.ending + (units + fixed) / reach(classes, count))
    return least


def _in_parts(classes: Classes, way: Way, units: Floats) -> Floats:
    """[plans]: as `_in_whole`, of parts of layers."""
    passes = in_parts(classes.stages, classes.trip, classes.left, units)
    if way.schedule.definition.has_chunks:
        parts = way.chunks * classes.stages
        passes = np.maximum(passes, in_parts(parts, classes.trip, classes.of_part[..., np.newaxis], units))
    return passes


def _in_whole(classes: Classes, way: Way, layers: int) -> Floats:
    """[plans]: the passes of the first micro-batch's trip, and those left of the largest stage, in whole layers."""
    head = classes.head, classes.of_last
    passes = in_whole(classes.stages, classes.trip, classes.left, layers, head)
    if way.schedule.definition.has_chunks:
        turn = in_whole(way.chunks * classes.stages, classes.trip, classes.turn[..., np.newaxis], layers)
        passes = np.maximum(passes, turn)
    return passes


def _least_in_whole(classes: Classes, beside: _Beside, count: Integers, way: Way, layers: int) -> Floats:
    """[plans]: seconds of an iteration, at least, where layers are alike and stages have whole ones."""
    least = np.maximum(
        beside.trip(way.chunks) + beside.ending + _in_whole(classes, way, layers),
        largest(classes.stages, classes.busy, layers),
    )
    if not way.schedule.definition.splits_backward:
        each = classes.both[..., np.newaxis] * np.arange(1.0, layers + 1)
        least = np.maximum(least, count * largest(classes.stages, each, layers) + beside.ending)
    return np.asarray(least)


def _of_mixed_replicas(classes: Classes, beside: _Beside, count: Integers, way: Way, units: Floats) -> Floats:
    """[plans]: as `_least`, where the GPUs of a stage may be of three or more kinds.

    The largest bound counts: for each number of fastest kinds, as if these were one kind and the others another one;
    and for the mean of all replicas, whose stages need not be whole numbers.
    """
    bounds = [_least(two, beside, count, way, units) for two in classes.in_twos]
    of_mean = replace(classes, stages=classes.shares)
    return np.max([*bounds, _least(of_mean, beside, count, way, units)], axis=0)


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
