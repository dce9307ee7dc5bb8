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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import LayerTimes
from fasop.costs.schedules import Number, backward_left, forward_left
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.partition.bounds import mean_of, whole_of
from fasop.search.by_stage.bounds.layout_batch import UnlikeReplicas
from fasop.simulation.linear import Linear
from fasop.simulation.nodes import times_on
from megatron_ext.contract.parallel_config import SCATTERS, Schedule

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


class Beside(NamedTuple):
    """One more chain of each plan, of which a mean with others may have a part."""

    price: Floats
    """[plans, stages]: seconds of a unit of work."""
    fixed: Floats
    """[plans]: seconds without any work."""
    weight: Floats
    """[plans]: beside which the others get their weights."""


def least(chains: Chains, work: float, beside: Beside | None = None) -> Floats:
    """[plans]: no way to share out so many units of work takes less."""
    later = np.zeros(len(chains.own))
    constant, whole, priced = later.copy(), later.copy(), np.zeros(chains.own.shape)
    if beside is not None:
        constant, whole = beside.weight * beside.fixed, beside.weight
        priced = beside.weight[:, np.newaxis] * beside.price
    faster = np.where(chains.exists, 1 / np.maximum(chains.own, 1e-30), 0.0)
    by_stage = (np.ascontiguousarray(kind.T[::-1]) for kind in (chains.trip, faster, chains.fixed, priced))
    for trip, rate, fixed, paid in zip(*by_stage, strict=True):
        weight = np.maximum(0.0, 1 - trip * later - paid) * rate
        later += weight
        constant += weight * fixed
    return np.maximum((work + constant) / np.maximum(later + whole, 1e-30), chains.fixed.max(axis=1))


class TripBound(NamedTuple):
    """The first micro-batch of a replica goes through all stages and back, then its stage has passes left: [plans,
    stages] each but for the last; a unit's trip takes `FAR` behind a plan's last stage."""

    trip: Floats
    """Seconds of a unit of work."""
    left: Linear
    """Passes that are left."""
    constant: Floats
    """[plans]: without any work."""

    def least(self, work: float, capacity: Integers | None = None) -> Floats:
        """[plans]: no way to share out so much work takes less; of whole layers, if stages have room for so many."""
        trip, fixed, layer = (np.ascontiguousarray(part) for part in (self.trip, self.left.fixed, self.left.layer))
        layer = np.maximum(layer, LEAST)
        left = Linear(fixed=fixed.T, layer=layer.T)
        longest = mean_of(trip.T, left, np.array(work))
        if capacity is not None:
            longest = np.maximum(longest, whole_of(trip.T, left, capacity.T, round(work)))
        return self.constant + longest


def left(schedule: Schedule, stages: UnlikeReplicas, total: int) -> tuple[Floats, Floats]:
    """[stages, replicas]: forward and backward passes of replicas, of all `total` micro-batches, that their first
    micro-batch's trip does not cover, but for those that may come after their last gradient
    (megatron_ext/contract/schedule/schedules.py).

    Those before its first gradient has left it count only with GPipe, and then of any replica of the stage.
    """
    backward = np.asarray(backward_left(schedule, stages.lag[:, np.newaxis], stages.counts), float)
    if schedule is Schedule.gpipe:
        in_gpipe = forward_in_gpipe(stages.own, stages.own[-1:], total)[:, np.newaxis]
        return np.repeat(in_gpipe, stages.counts.shape[1], axis=1).astype(float), backward
    return np.asarray(forward_left(schedule, stages.after[:, np.newaxis], stages.counts), float), backward


def forward_in_gpipe(own: Number, last: Number, total: int) -> Number:
    """Forward passes that follow the first one of some replica of a stage and precede the stage's first gradient.

    The last stage's replica that gives it has done all its forward passes, the last of which is one of the last `last`
    micro-batches; the stage's replica that handed that one on has done those before it, which are at least so many.
    """
    return (total - last) // own


def least_trip(passes: Floats, share: float, *, even: bool) -> Floats:
    """[stages]: seconds through one of a stage's replicas and the `share` of the way back, at least, of `passes` [2,
    stages, replicas], forward and backward; where stages have unlike numbers of replicas, two micro-batches of one
    replica may go there and back through two of another stage."""
    forward, backward = passes
    return (forward + share * backward).min(axis=1) if even else forward.min(axis=1) + share * backward.min(axis=1)


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
        self.messages = _messages(one, kinds, tensors)
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
        return (every[..., some] / self.units[some]).min(axis=-1)


def _messages(one: Training, kinds: Sequence[NodeKind], tensors: Sequence[int]) -> tuple[float, ...]:
    """Bytes of messages of which one takes least: the shortest, and where times were measured all that may be quicker
    than a shorter one."""
    whole = replace(one, parallel=replace(one.parallel, sequence_parallel=False))
    scatters = one.parallel.scatter_messages != SCATTERS[0]
    sizes_of = {
        float(min(sized(way, tensor).messages)) / part
        for way in (one, whole)
        for tensor in tensors
        for part in {1, tensor if scatters else 1}
    }
    every = sorted(sizes_of)
    return tuple(every if any(kind.collectives is not None for kind in kinds) else every[:1])


class Way(NamedTuple):
    """Which parts of backward passes count in a chain."""

    back: float
    """The part of a pass that a micro-batch goes through on its way back."""
    sums: bool
    """Whether it ends with the sum of the stage's gradients; else it goes back, to the embedding's."""


def ways(schedule: Schedule) -> list[Way]:
    """All chains, without what a schedule puts off of each backward pass."""
    return [Way(schedule.definition.input_share, False), Way(0.0, True)]


def until_returned(schedule: Schedule, lag: Any, count: Any, *, first: bool | NDArray[np.bool_]) -> Any:
    """Backward passes that a rank with `count` micro-batches has taken when its last gradient leaves it; the `first`
    stage's gradients leave it when all are done.

    Args:
        lag: `sum(replicas before) // own`, as in `left`.
    """
    return np.where(first, count, backward_left(schedule, lag, count) + schedule.definition.input_share)


def sized(one: Training, tensor: int) -> Training:
    """With tensor groups of one size in a single stage."""
    alike = replace(one.parallel, tensor=tensor, data=1, pipeline=1, replicas=None, shares=None, partition=None)
    return replace(one, parallel=replace(alike, node_order=None, schedule=Schedule.one_f_one_b))
