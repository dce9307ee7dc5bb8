"""Seconds below which no iteration is whose stages differ, proved: first of many layouts at once, then of a single one.

Let stage s be given x_s of the model's work. One of its replicas takes a_s x_s + c_s for all its micro-batches, and any
of them b_s x_s for one that goes there and back. Before the stage's first micro-batch comes, it has gone forward
through all stages before, and after its last one the gradient goes back through them; then the first stage sums its
gradients with the last one's. So for every s an iteration takes b_0 x_0 + … + b_(s-1) x_(s-1) + a_s x_s + d_s at least,
where d_s has all that does not depend on x. Another chain ends with the sum of the stage's own gradients. A third one
has a micro-batch go through all stages and back, and then what the stage has left to do. A mean of these, weighted so
that each unit of work costs 1 at least wherever it lies, bounds all partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.network import links
from fasop.costs.network.link_table import has_pairs
from fasop.costs.schedules import backward_left, filling, forward_left
from fasop.costs.training import Training
from fasop.partition.bounds import mean_of, whole_of
from fasop.simulation.linear import Linear
from fasop.simulation.on_nodes import times_on
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Schedule

FAR = 1e9
"""Seconds of a layer where there is no stage: none is laid there."""
LEAST = 1e-15
"""Seconds that are none, but may divide."""


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The chains of waits of plans; [plans, stages] each, where stages that a plan has not are behind its last one."""

    own: Floats
    """Seconds of a unit of work, for all micro-batches of a replica."""
    trip: Floats
    """Seconds of a unit, for one micro-batch on its way to later stages and back."""
    fixed: Floats
    """What such a chain takes without any work, from its beginning to the end of the iteration; of no stage 0."""
    exists: NDArray[np.bool_]


def least(chains: Chains, work: float) -> Floats:
    """[plans]: no way to share out so many units of work takes less."""
    later = np.zeros(len(chains.own))
    constant = np.zeros(len(chains.own))
    for stage in range(chains.own.shape[1] - 1, -1, -1):
        weight = np.maximum(0.0, 1 - chains.trip[:, stage] * later) / np.maximum(chains.own[:, stage], 1e-30)
        weight = np.where(chains.exists[:, stage], weight, 0.0)
        later += weight
        constant += weight * chains.fixed[:, stage]
    found: Floats = np.maximum((work + constant) / np.maximum(later, 1e-30), chains.fixed.max(axis=1))
    return found


class TripBound(NamedTuple):
    """The first micro-batch of a replica goes through all stages and back, then its stage has passes left: [plans,
    stages] each but for the last."""

    trip: Floats
    """Seconds of a unit of work."""
    left: Linear
    """Passes that are left."""
    exists: NDArray[np.bool_]
    constant: Floats
    """[plans]: without any work."""

    def least(self, work: float, capacity: Integers, *, alike: bool) -> Floats:
        """[plans]: no way to share out so much work takes less; stages have room for so many layers."""
        trip = np.where(self.exists, self.trip, FAR).T
        left = Linear(
            fixed=np.where(self.exists, self.left.fixed, 0.0).T,
            layer=np.where(self.exists, np.maximum(self.left.layer, LEAST), 1.0).T,
        )
        longest = mean_of(trip, left, np.array(work))
        if alike:
            room = np.where(self.exists, capacity, 0).T
            longest = np.maximum(longest, whole_of(trip, left, room, round(work)))
        found: Floats = self.constant + longest
        return found


def left(schedule: Schedule, layout: Layout, stage: int, count: int) -> tuple[float, float]:
    """Forward and backward passes that a replica of so many micro-batches has left when the gradient of its first one
    has left it, but for those that may come after its last one (megatron_ext/contract/schedule/schedules.py)."""
    own, replicas = layout.replicas[stage], layout.replicas
    ahead, lag = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
    return float(forward_left(schedule, ahead, count)), float(backward_left(schedule, lag, count))


class Work:
    """What units of a model's work take on nodes of some kinds, in tensor groups of each size: arrays [sizes, kinds].

    Where all layers are alike a unit is a layer; else layers are so many units each that no kind of node takes less for
    one, in any layer.
    """

    def __init__(self, one: Training, kinds: Sequence[NodeKind], tensors: Sequence[int]) -> None:
        self.sizes = {tensor: number for number, tensor in enumerate(tensors)}
        times = [[times_on(kind, sized(one, tensor)) for kind in kinds] for tensor in tensors]
        counts = one.blocks.counts[:, -1]
        every = [time for of_kinds in times for time in of_kinds]
        units = np.array(
            [np.mean([t.layers[k].forward + t.layers[k].backward for t in every]) for k in range(len(counts))]
        )
        self.units: Floats = np.ones(1) if len(counts) == 1 else units
        """How many units a layer of each kind is."""
        self.whole = float(self.units @ counts)
        self.forward, self.backward = (self._of_unit(times, name) for name in ("forward", "backward"))
        self.embedding, self.head = (
            np.array([[[getattr(t, part).forward, getattr(t, part).backward] for t in some] for some in times])
            for part in ("embedding", "head")
        )
        """[sizes, kinds, 2]"""
        self.message = float(min(min(sized(one, tensor).messages) for tensor in tensors))
        """Bytes, of the shortest."""
        some = self.units > 0
        self.gradients = [
            one.reduced_bytes * float((np.array(parameters)[some] / self.units[some]).min()) if some.any() else 0.0
            for tensor in tensors
            for parameters in [sizes.kind_parameters(one.model, tensor, own_word=True)]
        ]
        """[sizes]: bytes of a unit's gradients, at least."""

    def _of_unit(self, times: Sequence[Sequence[LayerTimes]], name: str) -> Floats:
        some = self.units > 0
        every = np.array([[[getattr(layer, name) for layer in t.layers] for t in of_size] for of_size in times])
        if not some.any():
            return np.zeros(every.shape[:2])
        least_of: Floats = (every[..., some] / self.units[some]).min(axis=-1)
        return least_of


class LayoutBatch:
    """Layouts with as many GPUs, in arrays [layouts, stages]."""

    def __init__(self, tensors: Integers, replicas: Integers, exists: NDArray[np.bool_]) -> None:
        self.tensors, self.replicas, self.exists = tensors, replicas, exists
        widths = tensors * replicas * exists
        self.ends = np.cumsum(widths, axis=1)
        self.begins = self.ends - widths
        self.last = exists.sum(axis=1) - 1

    @classmethod
    def of(cls, every: Sequence[Layout]) -> LayoutBatch:
        shape = len(every), max((layout.stages for layout in every), default=1)
        tensors, replicas, exists = np.ones(shape, np.int64), np.ones(shape, np.int64), np.zeros(shape, bool)
        for row, layout in enumerate(every):
            tensors[row, : layout.stages] = layout.tensors
            replicas[row, : layout.stages] = layout.replicas
            exists[row, : layout.stages] = True
        return cls(tensors, replicas, exists)

    def take(self, rows: Integers) -> LayoutBatch:
        most = int(self.last[rows].max(initial=0)) + 1
        return LayoutBatch(self.tensors[rows, :most], self.replicas[rows, :most], self.exists[rows, :most])

    def inside_nodes(self, gpus: Sequence[int]) -> NDArray[np.bool_]:
        """[layouts]: whether every tensor group lies inside one of nodes of so many GPUs."""
        fine = np.ones(len(self.tensors), bool)
        for end in [*accumulate(gpus)][:-1]:
            inside = (self.begins < end) & (end < self.ends)
            fine &= ~(inside & ((end - self.begins) % self.tensors > 0)).any(axis=1)
        return fine

    def least_seconds(self, nodes: Sequence[NodeKind], one: Training, work: Work, kinds: Sequence[str]) -> Floats:
        """[layouts]: on these nodes in their order, with the schedule and the micro-batches of `one`.

        `kinds` are those of `work`.
        """
        here, found = self._lies_on(nodes, kinds), np.zeros(len(self.tensors))
        for way in ways(one.parallel.schedule):
            chains = self._chains(way, nodes, one, work, kinds, here)
            found = np.maximum(found, least(chains, work.whole))
        return found

    def _chains(
        self,
        way: Way,
        nodes: Sequence[NodeKind],
        one: Training,
        work: Work,
        kinds: Sequence[str],
        here: Sequence[NDArray[np.bool_]],
    ) -> Chains:
        """What each stage takes in chains of this way: a micro-batch comes as fast as the stage's fastest kind of node
        lets it, and the stage's own passes take as long as on its slowest.

        `here` says which kinds of nodes a stage lies on. A replica takes `fewest` micro-batches at least; the first
        one of a stage, which is on the kind `first`, takes `most`.
        """
        parallel, size, number = one.parallel, self._size(work), np.arange(self.tensors.shape[1])
        count = parallel.global_batch_size // parallel.micro_batch_size
        fewest, most = count // self.replicas, -(-count // self.replicas)
        of_gpu = _kind_of_gpus(nodes, kinds)
        first = of_gpu[np.minimum(self.begins, len(of_gpu) - 1)]
        shape = self.tensors.shape
        own, hidden = np.zeros(shape), np.zeros(shape)
        trip, ends, embedding = (np.full(shape, np.inf) for _ in range(3))
        for kind, present in enumerate(here):
            forward, backward = work.forward[size, kind], work.backward[size, kind]
            batches = np.where(first == kind, most, fewest)
            own = _largest(own, batches * (forward + way.own * backward), present)
            hidden = _largest(hidden, filling(parallel.schedule) * backward, present)
            trip = _smallest(trip, forward + way.back * backward, present)
            of_ends = self._ends(work, size, kind)
            ends = _smallest(ends, fewest * (of_ends[0] + way.own * of_ends[1]), present)
            of_embedding = work.embedding[size, kind, 0] + way.back * work.embedding[size, kind, 1]
            embedding = _smallest(embedding, of_embedding, present)
        if way.sums:  # the chain does not go back to the first stage
            own += np.maximum(0.0, self._summed(nodes, one, work, kinds, here) - hidden * one.overlaps)
        after = 0.0 if way.sums else self._ending(nodes, one)[:, np.newaxis]
        messages = (1 if way.sums else 2) * self._hop(nodes, work) * number
        fixed = ends + messages + np.where(number > 0, embedding[:, :1], 0.0) + after
        return Chains(
            own=own,
            trip=np.where(self.exists, trip, 0.0),
            fixed=np.where(self.exists, fixed, 0.0),
            exists=self.exists,
        )

    def _lies_on(self, nodes: Sequence[NodeKind], kinds: Sequence[str]) -> list[NDArray[np.bool_]]:
        """[layouts, stages] for each kind of node: whether the stage lies on such nodes, too."""
        of_gpu = _kind_of_gpus(nodes, kinds)
        before = np.array([[0, *np.cumsum(of_gpu == kind)] for kind in range(len(kinds))])
        return [(before[kind][self.ends] > before[kind][self.begins]) & self.exists for kind in range(len(kinds))]

    def _ends(self, work: Work, size: Integers, kind: int) -> tuple[Floats, Floats]:
        """[layouts, stages], forward and backward: seconds of the embedding on the first stage and of the head on the
        last one."""
        number = np.arange(self.tensors.shape[1])
        is_first, is_last = number == 0, number == self.last[:, np.newaxis]
        embedding, head = work.embedding[size, kind], work.head[size, kind]
        forward, backward = (
            np.where(is_first, embedding[..., way], 0.0) + np.where(is_last, head[..., way], 0.0) for way in (0, 1)
        )
        return forward, backward

    def _size(self, work: Work) -> Integers:
        """[layouts, stages]: the number of each stage's tensor size in `work`."""
        numbers = np.zeros(max(work.sizes) + 1, np.int64)
        numbers[[*work.sizes]] = [*work.sizes.values()]
        found: Integers = numbers[self.tensors]
        return found

    def trip_seconds(self, nodes: Sequence[NodeKind], one: Training, work: Work, kinds: Sequence[str]) -> Floats:
        """[layouts]: a bound like `least_seconds` from another chain (`TripBound`), which takes longer to find."""
        schedule, count = one.parallel.schedule, one.parallel.global_batch_size // one.parallel.micro_batch_size
        half, size, shape = schedule.definition.input_share, self._size(work), self.tensors.shape
        ahead, back = self._passes_left(schedule, count)
        trip, layer, fixed, ends = (np.full(shape, np.inf) for _ in range(4))
        for kind, present in enumerate(self._lies_on(nodes, kinds)):
            forward, backward = work.forward[size, kind], work.backward[size, kind]
            of_ends = self._ends(work, size, kind)
            trip = _smallest(trip, forward + half * backward, present)
            layer = _smallest(layer, ahead * forward + back * backward, present)
            fixed = _smallest(fixed, ahead * of_ends[0] + back * of_ends[1], present)
            ends = _smallest(ends, of_ends[0] + half * of_ends[1], present)
        messages = 2 * self._hop(nodes, work) * self.last
        constant = messages + np.where(self.exists, ends, 0.0).sum(axis=1) + self._ending(nodes, one)
        chain = TripBound(trip, Linear(fixed=fixed, layer=layer), self.exists, constant)
        return chain.least(work.whole, np.full(shape, one.blocks.layers), alike=len(work.units) == 1)

    def _passes_left(self, schedule: Schedule, count: int) -> tuple[Floats, Floats]:
        """[layouts, stages]: what `left` says of each stage, for `count` micro-batches of the iteration."""
        behind = self.exists * self.replicas
        after = np.cumsum(behind[:, ::-1], axis=1)[:, ::-1]
        ahead: Integers = (after - 1) // self.replicas
        lag: Integers = (np.cumsum(behind, axis=1) - behind) // self.replicas
        fewest = count // self.replicas
        return np.asarray(forward_left(schedule, ahead, fewest)), np.asarray(backward_left(schedule, lag, fewest))

    def _summed(
        self,
        nodes: Sequence[NodeKind],
        one: Training,
        work: Work,
        names: Sequence[str],
        here: Sequence[NDArray[np.bool_]],
    ) -> Floats:
        """[layouts, stages]: seconds in which replicas on several nodes sum a unit's gradients, at least; `here` says
        which kinds of nodes a stage lies on."""
        if has_pairs(nodes):
            return np.zeros(self.tensors.shape)
        of_gpu = np.array([number for number, node in enumerate(nodes) for _ in range(node.gpus)])
        last = len(of_gpu) - 1
        apart = of_gpu[np.minimum(self.begins, last)] < of_gpu[np.maximum(self.ends - 1, 0)]
        each = np.zeros(max(work.sizes) + 1)
        each[[*work.sizes]] = [tensor * work.gradients[number] for tensor, number in work.sizes.items()]
        rounds = 1 if one.parallel.sharded_optimizer else 2  # a reduce-scatter, or an all-reduce
        bytes_sent = each[self.tensors] * rounds * (self.replicas - 1) / self.replicas
        slowest = np.zeros(self.tensors.shape)
        kinds = {node.name: node for node in nodes}
        for kind, present in zip(names, here, strict=True):
            link = links.between(kinds[kind].group, 1)
            slowest = np.maximum(slowest, np.where(present, kinds[kind].factors.gradients * link.s_per_byte, 0.0))
        return np.where(apart & (self.replicas > 1), bytes_sent * slowest, 0.0)

    def _hop(self, nodes: Sequence[NodeKind], work: Work) -> float:
        """Seconds of a message, at least."""
        if has_pairs(nodes):
            return 0.0
        kinds = {node.name: node for node in nodes}.values()
        ways = [
            kind.factors.messages * link.takes(work.message)
            for kind in kinds
            for link in (links.within(kind.group), links.between(kind.group, 1))
        ]
        return min(ways)

    def _ending(self, nodes: Sequence[NodeKind], one: Training) -> Floats:
        """[layouts]: seconds in which the first and the last stage sum the embedding's gradients, at least: nothing
        where they may lie on one node. All ranks of a stage that are on one node share its link."""
        if has_pairs(nodes):
            return np.zeros(len(self.tensors))
        of_gpu = np.array([number for number, node in enumerate(nodes) for _ in range(node.gpus)])
        rows = np.arange(len(self.tensors))
        apart = of_gpu[self.ends[:, 0] - 1] < of_gpu[np.minimum(self.begins[rows, self.last], len(of_gpu) - 1)]
        ends = (self.tensors[:, 0], self.tensors[rows, self.last])
        replicas = np.array([self.replicas[:, 0], self.replicas[rows, self.last]])
        members = replicas.sum(axis=0) / replicas.min(axis=0)
        widths = (self.ends[:, 0], self.ends[rows, self.last] - self.begins[rows, self.last])
        taken = np.zeros(len(self.tensors))
        for tensor in np.unique(np.minimum(*ends)):
            shared, holders = sizes.shared_parameters(one.model, int(tensor))
            size = float(one.gradient_bytes * shared)
            for node, width in zip((nodes[0], nodes[-1]), widths, strict=True):
                link = links.between(node.group, 1).all_reduce(min(holders, 2))
                sharing = np.minimum(width, node.gpus)
                seconds = node.factors.embedding * (link.latency_s + sharing * size * link.s_per_byte)
                taken = np.where(np.minimum(*ends) == tensor, np.maximum(taken, seconds), taken)
        return np.where(apart & (self.last > 0), taken * 2 * (members - 1) / members, 0.0)


def _kind_of_gpus(nodes: Sequence[NodeKind], kinds: Sequence[str]) -> Integers:
    """[GPUs]: the number of the kind of node that each lies in."""
    return np.array([kinds.index(node.name) for node in nodes for _ in range(node.gpus)])


def _largest(found: Floats, seconds: Floats, present: NDArray[np.bool_]) -> Floats:
    return np.maximum(found, np.where(present, seconds, 0.0))


def _smallest(found: Floats, seconds: Floats, present: NDArray[np.bool_]) -> Floats:
    return np.minimum(found, np.where(present, seconds, np.inf))


class Way(NamedTuple):
    """Which parts of backward passes count in a chain."""

    back: float
    """The part of a pass that a micro-batch goes through on its way back."""
    own: float
    """The part of each pass of the stage itself."""
    sums: bool
    """Whether it ends with the sum of the stage's gradients; else it goes back, to the embedding's."""


def ways(schedule: Schedule) -> list[Way]:
    """All chains, without what a schedule puts off of each backward pass."""
    return [Way(schedule.definition.input_share, schedule.definition.input_share, False), Way(0.0, 1.0, True)]


def sized(one: Training, tensor: int) -> Training:
    """With tensor groups of one size in a single stage."""
    alike = replace(one.parallel, tensor=tensor, data=1, pipeline=1, replicas=None, shares=None, partition=None)
    return replace(one, parallel=replace(alike, node_order=None, schedule=Schedule.one_f_one_b))
