"""Layouts near a good plan's, with its layers where they are, and about how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby, product
from typing import NamedTuple, TypeVar

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.by_stage.bounds.chains import LEAST, Work
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.bounds.layout_bounds import PlacedLayouts
from fasop.search.space.candidates import divisors
from fasop.simulation.linear import Linear
from fasop.simulation.nodes import step_s_per_parameter
from megatron_ext.contract.layout import Layout

MOVED = 4
"""GPUs that go from a stage to its neighbour, at most."""
TRADED = (-2, -1, 1, 2)
"""GPUs that the first stage gets from the last one."""
WINDOW = 4
"""Stages that follow each other and are replaced, at most, but where all of a kind are, or all but as many at both
ends."""
HALVED = 12
"""How often the range of seconds in which all layers find room is halved."""
LITTLE = 1e-6
"""Layers by which a stage may lack room for one."""
_T = TypeVar("_T")
Stages = tuple[tuple[int, int], ...]
"""Ranks of a tensor group and replicas, stage by stage."""


class Near(NamedTuple):
    """A layout with layers that may be good for it: those of the one that it is near, and balanced ones."""

    layout: Layout
    partitions: tuple[tuple[int, ...], ...]
    both_ends: bool = False
    """Whether it differs in them from the one that it is near."""
    bound: float = 0.0
    """Seconds below which none of its partitions is."""


class _Change(NamedTuple):
    """Others stand in the place of the stages from the first up to the last one."""

    first: int
    last: int
    new: Stages
    layers: tuple[int, ...]


def near(begin: Layout, layers: Sequence[int], tensors: Sequence[int], most: int) -> list[Near]:
    """List the layouts of at most so many stages, not all alike, that differ from one in stages that follow each other,
    in whose place others are, all alike, or two; or in both ends, which are each other's mirror image, or of which one
    gets GPUs from the other. Each has the `layers` of that one where they are."""
    layers, tensors = tuple(layers), tuple(tensors)
    stages = tuple(zip(begin.tensors, begin.replicas, strict=True))
    found: dict[Stages, tuple[tuple[int, ...], bool]] = {}
    starts: dict[tuple[int, Stages], _Change] = {}
    every = [*_changes(stages, layers, tensors)]
    for one in every:
        found.setdefault(_with(stages, one.new, one), (_with(layers, one.layers, one), False))
        if one.first == 0:
            starts.setdefault((one.last, one.new), one)
    for one in every:
        start = starts.get((len(stages) - one.first, one.new[::-1]))
        if one.last == len(stages) and start is not None and start.last <= one.first:
            both = _with(_with(stages, one.new, one), start.new, start)
            found.setdefault(both, (_with(_with(layers, one.layers, one), start.layers, start), True))
    for moved in TRADED if len(stages) > 1 else ():
        (first, of_first), (last, of_last) = ((stages[end][0] * stages[end][1], layers[end]) for end in (0, -1))
        for new, others in product(_fills(first + moved, tensors), _fills(last - moved, tensors)):
            own = *_even(of_first, len(new)), *layers[1:-1], *_even(of_last, len(others))
            found.setdefault((*new, *stages[1:-1], *others), (own, True))
    return [
        Near(Layout(sizes, replicas), (own,), both_ends)
        for one, (own, both_ends) in found.items()
        if len(one) <= most and len(set(one)) > 1 and one != stages
        for sizes, replicas in [zip(*one, strict=True)]
    ]


def _with(every: tuple[_T, ...], new: tuple[_T, ...], where: _Change) -> tuple[_T, ...]:
    return (*every[: where.first], *new, *every[where.last :])


def _windows(stages: Stages) -> Iterator[tuple[int, int]]:
    """From which stage up to which one others may stand in their place."""
    count, begin = len(stages), 0
    for _, alike in groupby(stages):
        end = begin + len([*alike])
        yield begin, end
        begin = end
    yield from ((ends, count - ends) for ends in range((count + 1) // 2))
    yield from ((first, last) for first in range(count) for last in range(first + 1, min(first + WINDOW, count) + 1))


def _changes(stages: Stages, layers: Sequence[int], tensors: tuple[int, ...]) -> Iterator[_Change]:
    widths = [tensor * replicas for tensor, replicas in stages]
    count = len(stages)
    for first, last in dict.fromkeys(_windows(stages)):
        width, whole = sum(widths[first:last]), sum(layers[first:last])
        for new in _fills(width, tensors):
            yield _Change(first, last, new, _even(whole, len(new)))
    for first in range(count - 1):
        both = sum(widths[first : first + 2])
        for own in range(max(1, widths[first] - MOVED), min(both, widths[first] + MOVED + 1)):
            whole = sum(layers[first : first + 2])
            shared = whole * own // both, whole - whole * own // both
            for one, other in product(tensors, tensors):
                if own % one == 0 and (both - own) % other == 0:
                    yield _Change(first, first + 2, ((one, own // one), (other, (both - own) // other)), shared)


@lru_cache(maxsize=4096)
def _fills(gpus: int, tensors: tuple[int, ...]) -> list[Stages]:
    """List the ways to have stages that are all alike on so many GPUs."""
    return [
        ((tensor, replicas),) * (gpus // tensor // replicas)
        for tensor in tensors
        if gpus > 0 and gpus % tensor == 0
        for replicas in divisors(gpus // tensor)
    ]


@lru_cache(maxsize=4096)
def _even(layers: int, stages: int) -> tuple[int, ...]:
    """So many layers of each stage."""
    return tuple((stage + 1) * layers // stages - stage * layers // stages for stage in range(stages))


class Sketches(PlacedLayouts):
    """Layouts on nodes in their order, with about how long they take."""

    def __init__(
        self, layouts: LayoutBatch, nodes: Sequence[NodeKind], kinds: Sequence[str], one: Training, work: Work
    ) -> None:
        """`one` has the schedule and the micro-batches of all layouts."""
        super().__init__(layouts, nodes, kinds)
        self._one, self._work = one, work
        share, costs = one.parallel.schedule.definition.input_share, self._costs(work)
        every = [[(kind.forward, kind.backward) for kind in costs], [kind.ends for kind in costs]]
        self._way = [np.where(layouts.exists, self._trip(times, costs, share), 0.0) for times in every]
        """[layouts, stages]: seconds of a unit, and beside units, of a micro-batch through a stage and back."""
        self._stages = self._of_stages()

    def padded(self, partitions: Sequence[Sequence[int]]) -> Integers:
        """[layouts, stages]: layers per stage, one partition for each layout; 0 beyond its last stage."""
        exists = self._layouts.exists
        found = np.zeros(exists.shape, np.int64)
        found[exists] = np.fromiter(chain.from_iterable(partitions), np.int64, int(exists.sum()))
        return found

    def seconds(self, layers: Integers) -> Floats:
        """[layouts]: about how long an iteration takes with [layouts, stages] layers: each stage's passes, sums and
        step, with a micro-batch's way through all other stages and back. Links inside a node count with their
        bandwidth."""
        blocks, (of_unit, ends) = self._one.blocks, self._way
        until = np.cumsum([0.0, *self._work.units[np.array(blocks.sequence, np.int64)]])
        units = np.diff(until[np.cumsum(layers, axis=1)], axis=1, prepend=0.0)
        stages = np.max([kind.of(units) for kind in self._stages], axis=0)
        way = (units * of_unit + ends + 2 * self._hops(self._work)).sum(axis=1)
        return np.asarray(stages.max(axis=1) + way)

    def balanced(self) -> Integers:
        """[layouts, stages]: layers per stage, all alike, with which none of a layout's stages takes long, as `seconds`
        has it, whatever memory they need."""
        layers, stages, exists = self._one.blocks.layers, self._stages, self._layouts.exists
        rates = [1 / np.maximum(kind.layer, LEAST) for kind in stages]
        free = [kind.layer <= LEAST for kind in stages]
        """Where layers take no time."""

        def room(level: Floats, number: int) -> Floats:
            fixed = stages[number].fixed
            found = (level - fixed) * rates[number]
            return np.where((level >= fixed) & free[number], layers, found) if free[number].any() else found

        def within(level: Floats) -> Integers:
            found = room(level, 0)
            for number in range(1, len(stages)):
                np.minimum(found, room(level, number), out=found)
            return np.where(exists, np.clip(np.floor(found + LITTLE), 0, layers), 0).astype(np.int64)

        least, most = (np.max([kind.of(np.array(count)) for kind in stages], axis=0) for count in (0, layers))
        low, high = (np.where(exists, of, np.inf).min(axis=1, keepdims=True) for of in (least, most))
        low = np.nextafter(low, -np.inf)  # no layer has room
        for _ in range(HALVED):
            middle = (low + high) / 2
            enough = within(middle).sum(axis=1, keepdims=True) >= layers
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        found, more = within(low), within(high)
        more -= found
        lacking = layers - found.sum(axis=1, keepdims=True) - (np.cumsum(more, axis=1) - more)
        found += np.clip(lacking, 0, more)
        return found

    def _of_stages(self) -> list[Linear]:
        """What stages take by their units, beside what a micro-batch takes in all of them: on nodes of each kind, which
        is no limit to stages that lie on none."""
        layouts, one, work, (of_unit, ends) = self._layouts, self._one, self._work, self._way
        parallel = one.parallel
        rows, sharded = np.arange(len(layouts.tensors)), parallel.sharded_optimizer
        rate = np.array([8e-9 / node.group.intra_gbit_per_s for node in self._nodes for _ in range(node.gpus)])
        inside = rate[np.minimum(layouts.begins, len(rate) - 1)] * layouts.tensors
        bytes_of = np.array(work.gradients)[self._sizes(work)]
        scattered = np.maximum(self._scattered(work), bytes_of * inside * (1 - 1 / layouts.replicas))
        replicas = np.array([layouts.replicas[:, 0], layouts.replicas[rows, layouts.last]])
        members, tied = replicas.sum(axis=0) / replicas.min(axis=0), self._embedding_parameters(one)
        summed = one.gradient_bytes * tied * inside[:, 0] * 2 * (members - 1) / members
        at_ends = np.zeros((2, *layouts.tensors.shape))
        for end in (np.zeros_like(rows), layouts.last):
            at_ends[:, rows, end] = np.maximum(self._ending(one), summed), tied
        beside = Linear(fixed=at_ends[0] - ends, layer=(scattered if sharded else 0.0) - of_unit)
        most = self._shared_out(parallel.global_batch_size // parallel.micro_batch_size)[1]
        found = []
        for kind in self._costs(work):
            step = step_s_per_parameter(self._kinds[self._names[kind.number]], one)
            stepped = step / layouts.replicas if sharded else step
            sums = np.maximum(scattered * (1 if sharded else 2) - one.overlaps * kind.backward, 0.0)
            layer = most * (kind.forward + kind.backward) + sums + stepped * bytes_of / one.reduced_bytes
            fixed = most * (kind.ends[0] + kind.ends[1]) + stepped * at_ends[1]
            own = Linear(fixed=fixed, layer=layer).plus(beside)
            found.append(
                Linear(fixed=np.where(kind.present, own.fixed, -np.inf), layer=np.where(kind.present, own.layer, 1.0))
            )
        return found
