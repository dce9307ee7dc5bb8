"""Plans whose stages differ, but for their partition: which there are on some nodes, and what bounds each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conf.schema.values.partition import Shares
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.search.by_stage.bounds.bounded_rows import BoundedRows, Row, Rows
from fasop.search.by_stage.bounds.chains import Work, sized
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.layouts import Layouts, layouts
from fasop.search.by_stage.neighbours import Near, Sketches, near
from fasop.search.plan import Plan
from fasop.search.space import node_orders
from fasop.search.space.candidates import MOST_REPLICAS, divisors, fastest_first
from fasop.search.space.choices import SEARCHED, Choices
from megatron_ext.contract.layout import Layout

SCHEDULES = tuple(schedule for schedule in SEARCHED if not schedule.definition.has_chunks)
"""Those of stages with unlike numbers of replicas."""
PLACED = 600_000
"""Layouts times node orders of which bounds are found, at most: of more orders there are fewer layouts."""
PER_CHANGE, PER_PART = 0.05, 0.6
"""How much longer than its bound a plan takes (logarithms), for each factor of e by which stages differ, and if a
replica has but one of the micro-batches."""


class StagedPlans:
    """All layouts on all orders of some nodes."""

    def __init__(self, training: Training, kinds: Sequence[NodeKind], choices: Choices, most: int) -> None:
        self.kinds = [kind for kind in kinds if kind.group.count]
        self.names = [kind.name for kind in self.kinds]
        self._training, self._choices = training, choices
        gpus = [kind.gpus for kind in self.kinds]
        self.tensors = tensor_sizes(training, self.kinds, choices)
        self._stages = min(training.blocks.most_stages, gpus_of(self.kinds))
        self.orders = self._orders() if self.tensors else []
        self.options = [*self._options()] if self.tensors else []
        self._gpus, self._most_layouts = math.gcd(*gpus), min(most, PLACED // max(1, len(self.orders)))
        self._works: dict[tuple[object, ...], Work] = {}

    @cached_property
    def every(self) -> Layouts:
        """The layouts of these nodes, so many at most."""
        if not self.tensors:
            return Layouts((), "")
        return layouts(gpus_of(self.kinds), self._gpus, self.tensors, self._stages, self._most_layouts)

    @cached_property
    def wanted(self) -> list[Layout]:
        """Those whose sizes are to be tried."""
        return [layout for layout in self.every.every if self._tries(layout)]

    @cached_property
    def many(self) -> LayoutBatch:
        return LayoutBatch.of(self.wanted)

    def _orders(self) -> list[list[NodeKind]]:
        counts = [kind.group.count for kind in self.kinds]
        if node_orders.few(counts):
            found = node_orders.orders(counts).tolist()
        else:
            fastest = fastest_first(self.kinds, sized(self._training, self.tensors[0]))
            found = [
                [fastest[kind] for kind in order]
                for order in node_orders.starts([counts[kind] for kind in fastest]).tolist()
            ]
        return [[self.kinds[kind] for kind in order] for order in found]

    def _options(self) -> Iterator[Training]:
        """All but layout and order; those that save memory come last."""
        training, parallel = self._training, self._training.parallel
        plain = replace(parallel, tensor=max(self.tensors), data=1, pipeline=1)
        for size in self._choices.micro_batch_size or divisors(parallel.global_batch_size):
            if parallel.global_batch_size % size:
                continue
            for schedule in self._choices.schedule:
                if schedule in SCHEDULES:
                    one = replace(plain, micro_batch_size=size, schedule=schedule, data=_more(parallel, size))
                    for variant in self._choices.variants(one):
                        if not variant.sequence_parallel or training.model.sequence_length % max(self.tensors) == 0:
                            yield replace(training, parallel=replace(variant, tensor=1, data=1))

    def rows(self, number: int, orders: Sequence[int], worth: Callable[[Floats], NDArray[np.bool_]]) -> Iterator[Rows]:
        """Return what `BoundedRows.of` does."""
        return self._bounded.of(number, orders, worth)

    @cached_property
    def _bounded(self) -> BoundedRows:
        return BoundedRows(self.many, self.orders, self.names, self.options, self._work)

    def estimate(self, row: Row, bound: float) -> float:
        """Seconds that plans may take which have such a bound, to say which are worth a look.

        Replicas with few micro-batches each, and stages that differ, take longer than their bounds say. The factors
        were fitted to 350 plans on two clusters, where bounds alone had the slowest plans first.
        """
        parallel = self.options[row.numbers[0]].parallel
        count = parallel.global_batch_size // parallel.micro_batch_size
        return bound * math.exp(PER_CHANGE * self._changes[row.layout] + PER_PART * self._most[row.layout] / count)

    @cached_property
    def _changes(self) -> list[float]:
        """[layouts]: by what factors stages' replicas and tensor groups differ from those before: logarithms."""
        many = self.many
        steps = np.abs(np.diff(np.log(many.replicas), axis=1)) + np.abs(np.diff(np.log(many.tensors), axis=1))
        return (steps * many.exists[:, 1:]).sum(axis=1).tolist()

    @cached_property
    def _most(self) -> list[int]:
        """[layouts]: replicas of a stage, at most."""
        return (self.many.replicas * self.many.exists).max(axis=1).tolist()

    def near(self, begin: Layout, layers: Sequence[int], order: int, option: int) -> list[Near]:
        """Layouts near one with such layers, those first that seem to be the fastest, with a bound of each."""
        one, nodes, found = self.options[option], self.orders[order], near(begin, layers, self.tensors, self._stages)
        parallel = one.parallel
        most = min(parallel.global_batch_size // parallel.micro_batch_size, MOST_REPLICAS)
        found = [some for some in found if self._tries(some.layout) and max(some.layout.replicas) <= most]
        many = LayoutBatch.of([some.layout for some in found])
        fine = np.flatnonzero(many.inside_nodes([node.gpus for node in nodes]))
        if not fine.size:
            return []
        found = [found[row] for row in fine]
        work = self._work(one)
        sketches = Sketches(many.take(fine), nodes, self.names, one, work)
        every = [some.partitions for some in found]
        compared = [sketches.padded([own for (own,) in every])]
        if one.blocks.alike:
            compared.append(sketches.balanced())
            rows = zip(every, compared[1].tolist(), strict=True)
            every = [(*own, tuple(balanced[: len(own[0])])) for own, balanced in rows]
        seconds = np.array([sketches.seconds(some) for some in compared])
        bounds = sketches.trip_seconds(one, work)[int(parallel.sharded_optimizer)]
        ranks = np.argsort(np.argsort([seconds[0], seconds.min(axis=0) * bounds], axis=1, kind="stable"), axis=1)
        promising = np.argsort(ranks.min(axis=0), kind="stable").tolist()
        return [found[row]._replace(partitions=every[row], bound=float(bounds[row])) for row in promising]

    def other_micro_batches(self, layout: Layout, option: int) -> list[int]:
        """List the numbers of the same options with the next smaller and the next larger micro-batches that every
        replica gets one of."""
        own = self.options[option].parallel
        sizes = {
            one.parallel.micro_batch_size: number
            for number, one in enumerate(self.options)
            if replace(one.parallel, micro_batch_size=own.micro_batch_size) == own
            and max(layout.replicas) * one.parallel.micro_batch_size <= own.global_batch_size
        }
        every = sorted({*sizes, own.micro_batch_size})
        place = every.index(own.micro_batch_size)
        return [sizes[size] for size in every[max(0, place - 1) : place + 2] if size != own.micro_batch_size]

    def places_of(self, plan: Plan) -> list[tuple[int, int]]:
        """The node order of a plan, and the most similar options with which its stages may differ, by their numbers:
        none on other nodes."""
        names = [node.name for node in plan.nodes]
        orders = [number for number, order in enumerate(self.orders) if [node.name for node in order] == names]
        own = plan.training.parallel

        def unlike(number: int) -> tuple[bool, ...]:
            one = self.options[number].parallel
            keys = "micro_batch_size", "recompute", "schedule", "sequence_parallel"
            return *(getattr(one, key) != getattr(own, key) for key in keys), not one.sharded_optimizer

        return [(order, min(range(len(self.options)), key=unlike)) for order in orders[:1] if self.options]

    def _work(self, one: Training) -> Work:
        key = one.parallel.micro_batch_size, one.parallel.recompute
        if key not in self._works:
            self._works[key] = Work(one, self.kinds, self.tensors)
        return self._works[key]

    def _tries(self, layout: Layout) -> bool:
        """Whether its sizes are to be tried."""
        stages, data = self._choices.pipeline, self._choices.data
        return (stages is None or layout.stages in stages) and (data is None or set(layout.replicas) <= {*data})

    def candidate(self, layout: Layout, order: int, option: int) -> Candidate:
        """Build a plan but for its partition; the option by its number."""
        one = self.options[option]
        parallel = one.parallel
        count = parallel.global_batch_size // parallel.micro_batch_size
        alike = len(set(layout.tensors)) == 1
        shares = Shares.even(count, layout.replicas[0]).numbers if layout.even and count % layout.replicas[0] else None
        staged = replace(
            parallel,
            tensor=layout.tensors[0] if alike else layout.tensors,
            data=max(layout.replicas),
            replicas=None if layout.even else layout.replicas,
            pipeline=layout.stages,
            shares=shares,
        )
        return Candidate(replace(one, parallel=staged), self.orders[order], self._work(one), self.names)


def _more(parallel: Parallelism, size: int) -> int:
    """Replicas, so that options of several of them are tried."""
    count = parallel.global_batch_size // size
    return next((data for data in (2, 3) if count % data == 0), 1)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind], choices: Choices) -> list[int]:
    """Those that divide the model, fit into a node, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    shared = [] if model.measured else [model.heads, model.num_query_groups, model.ffn_hidden]
    return [
        size
        for size in range(1, max(kind.gpus for kind in kinds) + 1)
        if all(number is None or number % size == 0 for number in shared)
        and all(known is None or size in known for known in measured)
        and (choices.tensor is None or size in choices.tensor)
    ]
