"""Layouts near a good plan's, with its layers where they are, and about how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise, product
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from fasop.costs.arrays import Floats
from fasop.costs.training import Training
from fasop.search.by_stage.bounds import Work
from fasop.search.by_stage.layout_bounds import PlacedLayouts, largest_present
from fasop.search.space.candidates import divisors
from fasop.simulation.nodes import step_s_per_parameter
from megatron_ext.contract.layout import Layout

MOVED = 4
"""GPUs that go from a stage to its neighbour, at most."""
TRADED = (-2, -1, 1, 2)
"""GPUs that the first stage gets from the last one."""
WINDOW = 4
"""Stages that follow each other and are replaced, at most, but where all of a kind are, or all but as many at both
ends."""
_T = TypeVar("_T")
Stages = tuple[tuple[int, int], ...]
"""Ranks of a tensor group and replicas, stage by stage."""


class Near(NamedTuple):
    """A layout with layers that may be good for it."""

    layout: Layout
    partition: tuple[int, ...]
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


def near(begin: Near, tensors: Sequence[int], most: int) -> list[Near]:
    """List the layouts of at most so many stages, not all alike, that differ from one in stages that follow each other,
    in whose place others are, all alike, or two; or in both ends, which are each other's mirror
    image, or of which one gets GPUs from the other."""
    layers = begin.partition
    stages = tuple(zip(begin.layout.tensors, begin.layout.replicas, strict=True))
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
            begun, ended = _spread(of_first, [1] * len(new)), _spread(of_last, [1] * len(others))
            found.setdefault((*new, *stages[1:-1], *others), ((*begun, *layers[1:-1], *ended), True))
    return [
        Near(Layout(tuple(map(itemgetter(0), one)), tuple(map(itemgetter(1), one))), *how)
        for one, how in found.items()
        if len(one) <= most and len(set(one)) > 1 and one != stages
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


def _changes(stages: Stages, layers: Sequence[int], tensors: Sequence[int]) -> Iterator[_Change]:
    widths = [tensor * replicas for tensor, replicas in stages]
    count = len(stages)
    for first, last in dict.fromkeys(_windows(stages)):
        width, whole = sum(widths[first:last]), sum(layers[first:last])
        for new in _fills(width, tensors):
            yield _Change(first, last, new, _spread(whole, [1] * len(new)))
    for first in range(count - 1):
        both = sum(widths[first : first + 2])
        for own in range(max(1, widths[first] - MOVED), min(both, widths[first] + MOVED + 1)):
            shared = _spread(sum(layers[first : first + 2]), [own, both - own])
            for one, other in product(tensors, tensors):
                if own % one == 0 and (both - own) % other == 0:
                    yield _Change(first, first + 2, ((one, own // one), (other, (both - own) // other)), shared)


def _fills(gpus: int, tensors: Sequence[int]) -> list[Stages]:
    """List the ways to have stages that are all alike on so many GPUs."""
    return [
        ((tensor, replicas),) * (gpus // tensor // replicas)
        for tensor in tensors
        if gpus > 0 and gpus % tensor == 0
        for replicas in divisors(gpus // tensor)
    ]


def _spread(layers: int, weights: Sequence[int]) -> tuple[int, ...]:
    whole = sum(weights)
    ends = [before * layers // whole for before in accumulate(weights, initial=0)]
    return tuple(end - begin for begin, end in pairwise(ends))


class Sketches(PlacedLayouts):
    """Layouts on nodes in their order, with layers."""

    def seconds(self, one: Training, work: Work, partitions: Sequence[Sequence[int]]) -> Floats:
        """[layouts]: about how long an iteration takes: each stage's passes, sums and step, with a micro-batch's way
        through all other stages and back. Links inside a node count with their bandwidth."""
        layouts, parallel = self._layouts, one.parallel
        until = np.cumsum([0.0, *work.units[np.array(one.blocks.sequence, np.int64)]])
        rows, padded = np.arange(len(partitions)), np.zeros(layouts.tensors.shape, np.int64)
        padded[layouts.exists] = [*chain.from_iterable(partitions)]
        units = np.diff(until[np.cumsum(padded, axis=1)], axis=1, prepend=0.0)
        rate = np.array([8e-9 / node.group.intra_gbit_per_s for node in self._nodes for _ in range(node.gpus)])
        inside = rate[np.minimum(layouts.begins, len(rate) - 1)] * layouts.tensors
        bytes_of = np.array(work.gradients)[self._sizes(work)]
        scattered = units * np.maximum(self._scattered(work), bytes_of * inside * (1 - 1 / layouts.replicas))
        replicas = np.array([layouts.replicas[:, 0], layouts.replicas[rows, layouts.last]])
        members, tied = replicas.sum(axis=0) / replicas.min(axis=0), self._embedding_parameters(one)
        summed = one.gradient_bytes * tied * inside[:, 0] * 2 * (members - 1) / members
        at_ends = np.zeros((2, *units.shape))
        for end in (np.zeros_like(rows), layouts.last):
            at_ends[:, rows, end] = np.maximum(self._ending(one), summed), tied
        stepped = units * bytes_of / one.reduced_bytes + at_ends[1]
        if parallel.sharded_optimizer:
            stepped /= layouts.replicas
        most = self._shared_out(parallel.global_batch_size // parallel.micro_batch_size)[1]
        whole, costs = np.zeros(units.shape), self._costs(work)
        for kind in costs:
            forward, backward = kind.forward * units + kind.ends[0], kind.backward * units + kind.ends[1]
            sums = scattered * (1 if parallel.sharded_optimizer else 2) - one.overlaps * kind.backward * units
            step = step_s_per_parameter(self._kinds[self._names[kind.number]], one) * stepped
            whole = largest_present(whole, most * (forward + backward) + np.maximum(sums, 0.0) + step, kind.present)
        share = parallel.schedule.definition.input_share
        every = [[(kind.forward, kind.backward) for kind in costs], [kind.ends for kind in costs]]
        of_unit, ends = (np.where(layouts.exists, self._trip(times, costs, share), 0.0) for times in every)
        trip = units * of_unit + ends
        others = trip.sum(axis=1, keepdims=True) - trip + 2 * self._hops(work).sum(axis=1, keepdims=True)
        whole += (scattered if parallel.sharded_optimizer else 0.0) + at_ends[0] + others
        return np.where(layouts.exists, whole, 0.0).max(axis=1)
