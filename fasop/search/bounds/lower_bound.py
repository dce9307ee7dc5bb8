"""Times that no plan of given sizes beats, in whatever order the nodes come: known before any stage is laid on a node.

A replica has a part of every stage. If GPUs, sorted by speed, share stages in that order, the j fastest stages are as
fast as they can be in any order of the nodes, for every j, where each stage lies in one node. Where replicas may lie on
different kinds of nodes, that holds for the fastest kinds together, for at least one replica, and for the mean of all
replicas. The chains of waits are those of `fasop.partition.bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Bools, Floats
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.parallelism import Parallelism
from fasop.costs.shared_layers import layer_numbers
from fasop.costs.sizes import kind_parameters
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.partition.local_search import Worth
from fasop.search.bounds.gpu_classes import (
    Way,
    busy_seconds,
    classes_of,
    gpus_of_sets,
    has_heterogeneous_replicas,
    micro_batches_of,
    of_each,
)
from fasop.search.bounds.iteration_bounds import (
    Beside,
    ends_of,
    least_in_whole,
    least_of_mixed_replicas,
    least_seconds,
    passes_in_parts,
)
from fasop.search.bounds.least_exchange import LinkBounds
from fasop.simulation.linear import TINY
from fasop.simulation.nodes import Nodes, step_s_per_parameter, times_on
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.parallel_config import Recompute, Schedule


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
        self.runs_as: dict[tuple[tuple[int, ...], Schedule, int], Bools] = {}
        """Which of these have a schedule and number of chunks."""
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
            if not alone.round_s.any() or (has_heterogeneous_replicas(one, kinds) and not _in_order(times)):
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
        seconds = of_each(plans, lambda one: self._of_kinds(one, way.recompute, some).seconds)
        if whole:
            units, times = np.full(len(plans), float(layers)), seconds[:, 2]
        else:
            units, times = self._units(plans, way, some)
        count, replicas = of_each(plans, lambda one: micro_batches_of(one, kinds)).T
        mixed = of_each(plans, lambda one: has_heterogeneous_replicas(one, kinds))
        unlike = mixed & (len(kinds) > 2)  # of which classes in twos say something alone
        gpus = gpus_of_sets(sets)
        classes = classes_of(plans, way, kinds, times, seconds[:, 1], (count, replicas), mixed, gpus)
        found = np.where(unlike, 0.0, ends_of(way, seconds).sum(axis=1) + passes_in_parts(classes, way, units))
        closer = np.nonzero(every if worth is None else worth(found))[0]
        if not len(closer):
            return found
        plans, sets = [plans[number] for number in closer.tolist()], [sets[number] for number in closer.tolist()]
        count, mixed, unlike = count[closer], mixed[closer], unlike[closer]
        units, seconds, times = units[closer], seconds[closer], times[closer]
        gpus, classes = gpus[closer], classes.take(closer)
        beside = self._beside(plans, way, sets, seconds, times)
        least = least_seconds(classes, beside, count, way, units)
        if unlike.any():
            some_of = np.nonzero(unlike)[0]
            least[some_of] = least_of_mixed_replicas(
                classes.take(some_of), beside.take(some_of), count[some_of], way, units[some_of]
            )
        found[closer] = np.maximum(found[closer], least)
        best = np.nonzero((every if worth is None else worth(found))[closer])[0]
        if whole and len(best):
            plans, sets = [plans[number] for number in best.tolist()], [sets[number] for number in best.tolist()]
            count, mixed, unlike, base = count[best], mixed[best], unlike[best], beside.take(best)
            busy = busy_seconds(plans, way, self._on_links.alone_on(plans, sets), times[best], count, mixed, gpus[best])
            its_own = replace(classes.take(best), busy=busy)
            least = least_in_whole(its_own, base, count, way, layers)
            if unlike.any():
                some_of = np.nonzero(unlike)[0]
                base, count = base.take(some_of), count[some_of]
                twos = its_own.take(some_of).in_twos
                least[some_of] = np.max([least_in_whole(two, base, count, way, layers) for two in twos], axis=0)
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
        counted = (units > 0)[:, np.newaxis, :, np.newaxis]  # layers that take no time have none
        of_unit = np.where(counted, times / np.where(counted, units[:, np.newaxis, :, np.newaxis], 1.0), np.inf)
        least = of_unit.min(axis=2)
        return units @ plans[0].blocks.counts[:, -1], np.where(least < np.inf, least, 0.0)

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
    ) -> Beside:
        """`seconds` are `_Times.seconds` of the plans, on these kinds; for `times` see `classes_of`."""
        one_way = times.min(axis=1).max(axis=1)
        return Beside(*np.array(self._on_links.of(plans, sets)).T, *np.column_stack([ends_of(way, seconds), one_way]).T)


def quickest(recompute: Sequence[Recompute]) -> Sequence[Recompute]:
    """Those of which plans take the least: to compute layers again takes no less than to compute none again."""
    return (Recompute.none,) if Recompute.none in recompute else recompute


def _in_order(times: Sequence[LayerTimes]) -> bool:
    """Whether a kind that is slower than another one in any pass of any part of the model is so in all of them."""
    parts = [[time.embedding, *time.layers, time.head] for time in times]
    passes = np.array([[seconds for part in of for seconds in (part.forward, part.backward)] for of in parts])
    return bool((np.diff(passes[np.lexsort(passes.T)], axis=0) >= 0).all())
