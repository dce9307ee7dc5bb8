"""Partitions of layers that differ: which fit, the smallest largest part, and what moving a layer may gain.

Parts take neighbouring layers, in the model's order, so that a part which begins where another one ends takes the most
layers that it has the time and the memory for: no partition goes further with as many parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import partitions as compiled
from fasop.costs.arrays import Floats, Integers
from fasop.simulation.linear import TINY, Linear
from fasop.simulation.pipelines import FULL, Pipelines

STEPS = 40
"""Halvings of the interval in which the smallest largest part lies, at most."""
CLOSE = 1e-7
"""The part of it that need not be halved."""
MOST_BORDERS = 16
"""Between kinds of layers, to which cuts are moved."""
ROUNDING = 1e-12
"""The part of a time by which sums of the same times may differ."""


def fitting(pipelines: Pipelines) -> NDArray[np.bool_]:
    """[pipelines]: whether any partition fits; of several chunks, whether one fits whose chunks share the memory."""
    return _filled([memory_taken(pipelines)], memory_left(pipelines)[np.newaxis]).possible


def least_largest_part(pipelines: Pipelines, costs: Linear | None = None) -> Integers:
    """The partitions whose largest part, forward and backward, takes least, but for `CLOSE`. All must be `fitting`.

    With `costs` [parts, pipelines] the largest of these. A limit that no partition keeps is raised at once to the
    shortest part that keeping one more layer would make (Nicol 1994).
    """
    costs = both_of_parts(pipelines) if costs is None else costs
    memory, room = memory_taken(pipelines), memory_left(pipelines)
    of_layers, fixed = of_first_layers(pipelines, costs.layer), costs.fixed
    found = _filled([memory], room[np.newaxis]).partitions
    most = costs.of(pipelines.counted(found)).max(axis=0)
    least = np.maximum(fixed.max(axis=0), _level(costs, pipelines))
    for _ in range(STEPS):
        open_ = most - least > CLOSE * most
        if not open_.any():
            break
        middle = np.where(open_, (least + most) / 2, most)
        tried = _filled([memory, of_layers], np.stack([room, middle - fixed]), fixed)
        taken = costs.of(pipelines.counted(tried.partitions)).max(axis=0)
        better = tried.possible & (taken < most)
        found[:, better], most[better] = tried.partitions[:, better], taken[better]
        least = np.where(tried.possible, least, np.maximum(least, np.maximum(middle, tried.following)))
    return found


def gains(pipelines: Pipelines, partitions: Integers, slopes: Floats, pairs: Integers) -> Floats:
    """[pipelines, pairs]: seconds that an iteration may become shorter by, at most, if a layer leaves one part for
    another. `slopes` are [kinds, parts, pipelines] at the partitions.

    All cuts between the two parts move by one layer, so parts between them hand one on. As long as nothing of the sums
    is hidden, times are no shorter than the slopes say, but for messages: every one of the longest path may be shorter.
    """
    assert pipelines.order is not None
    order, parts, every = pipelines.order, len(partitions), np.arange(partitions.shape[1])
    behind = np.cumsum(partitions, axis=0)[:-1]
    kind = np.argmax(np.diff(order.counts, axis=1), axis=0)
    links = _seconds_of_messages(pipelines)
    cuts = np.arange(parts - 1)[:, np.newaxis]
    found = []
    for step in (-1, 1):  # a cut moves towards the beginning, or the end
        moved = kind[np.clip(behind + min(step, 0), 0, order.layers - 1)]
        change = slopes[moved, cuts + 1, every] - slopes[moved, cuts, every]
        shorter = order.extra[behind] - order.extra[np.clip(behind + step, 0, order.layers)]
        gained = step * change + np.maximum(0.0, shorter) * links
        found.append(np.concatenate([np.zeros((1, len(every))), np.cumsum(gained, axis=0)]))
    source, target = pairs.T
    towards_end, towards_begin = found
    to_later, to_earlier = towards_end[target] - towards_end[source], towards_begin[source] - towards_begin[target]
    whole: Floats = np.where((source < target)[:, np.newaxis], to_later, to_earlier)
    return np.ascontiguousarray(whole.T)


def passes_with_one_more(pipelines: Pipelines, partitions: Integers, pairs: Integers) -> Floats:
    """[pipelines, pairs]: seconds of all passes of the part that gets a layer, as in `gains`, at least."""
    assert pipelines.order is not None
    order, both, behind = pipelines.order, both_of_parts(pipelines), np.cumsum(partitions, axis=0)
    kind, parts = np.argmax(np.diff(order.counts, axis=1), axis=0), np.arange(len(partitions))[:, np.newaxis]
    own, every = both.of(pipelines.counted(partitions)), np.arange(partitions.shape[1])
    before = own + both.layer[kind[np.maximum(behind - partitions - 1, 0)], parts, every]
    after = own + both.layer[kind[np.minimum(behind, order.layers - 1)], parts, every]
    source, target = pairs.T
    longest: Floats = np.where((source < target)[:, np.newaxis], before[target], after[target])
    return np.ascontiguousarray(_fewest_passes(pipelines) * longest.T)


def _fewest_passes(pipelines: Pipelines) -> int:
    """How many micro-batches the slowest GPU of a stage goes through at least: replicas may differ in that."""
    return min([pipelines.micro_batches, *(one.lines.micro_batches for one in pipelines.replicas)])


def _seconds_of_messages(pipelines: Pipelines) -> Floats:
    """[parts - 1, pipelines]: what all messages across a cut, there and back, take longer for a byte."""
    assert pipelines.s_per_byte is not None
    rate, chunks = pipelines.s_per_byte, pipelines.parts_count // pipelines.stages
    if pipelines.back is not None and pipelines.back.s_per_byte is not None:
        rate = (rate + pipelines.back.s_per_byte) / 2
    return 2 * pipelines.micro_batches * chunks * np.tile(rate, (chunks, 1))[:-1]


def cuts_elsewhere(pipelines: Pipelines, partitions: Integers, seconds: Floats) -> tuple[Integers, Integers]:
    """[partitions]: numbers of pipelines; and [parts, partitions]: theirs with one of the cuts somewhere else, and with
    those that it passes. Only those of which no part's passes take `seconds` alone.

    A cut goes by 1, 2, 4 layers and so on, and to where another kind begins or messages become longer or shorter.
    """
    assert pipelines.order is not None
    order, cuts = pipelines.order, np.cumsum(partitions, axis=0)[:-1]
    steps = 2 ** np.arange(order.layers.bit_length())
    kind = np.argmax(np.diff(order.counts, axis=1), axis=0)
    borders = 1 + np.nonzero((np.diff(kind) != 0) | (np.diff(order.extra[:-1]) != 0))[0][:MOST_BORDERS]
    near = cuts + np.concatenate([steps, -steps]).reshape(-1, 1, 1)
    places = np.concatenate([near, np.broadcast_to(borders.reshape(-1, 1, 1), (len(borders), *cuts.shape))])
    which, number, owner = np.nonzero((places >= 0) & (places <= order.layers) & (places != cuts))
    place, before, every = places[which, number, owner], cuts[:, owner], np.arange(len(cuts))[:, np.newaxis]
    moved = np.where(every < number, np.minimum(before, place), np.maximum(before, place))
    moved[number, np.arange(len(number))] = place
    whole = np.pad(moved, ((1, 1), (0, 0)))
    whole[-1] = order.layers
    both, part = both_of_parts(pipelines), np.arange(len(partitions))[:, np.newaxis]
    of_first = of_first_layers(pipelines, both.layer)
    passes = both.fixed[:, owner] + of_first[whole[1:], part, owner] - of_first[whole[:-1], part, owner]
    some = np.nonzero(_fewest_passes(pipelines) * passes.max(axis=0) < seconds[owner])[0]
    return owner[some], np.diff(whole[:, some], axis=0)


@dataclass(frozen=True, kw_only=True)
class _Filled:
    partitions: Integers
    """[parts, pipelines]; what is left over has the last part."""
    possible: NDArray[np.bool_]
    following: Floats
    """[pipelines]: by the last of the sums, what the shortest part takes that its limit keeps from one more layer."""


def _filled(sums: list[Floats], limits: Floats, fixed: Floats | None = None) -> _Filled:
    """Parts that take as many layers as all limits allow, one after another.

    `sums` are [layers + 1, parts, pipelines]: what the first layers take, on each part; `limits` [sums, parts,
    pipelines] what a part may take. `fixed` [parts, pipelines] is what parts take of the last sum without layers.
    """
    layers, parts, columns = sums[0].shape[0] - 1, *sums[0].shape[1:]
    every, possible = np.arange(columns), (limits >= 0).all(axis=(0, 1))
    if hasattr(compiled, "filled"):
        beside = np.zeros((parts, columns)) if fixed is None else fixed
        found, at, following = compiled.filled(np.stack(sums), limits, beside, ROUNDING)
        found[-1] += layers - at
        return _Filled(partitions=found, possible=possible & (at == layers), following=following)
    at = np.zeros(columns, np.int64)
    found, following = np.zeros((parts, columns), np.int64), np.full(columns, np.inf)
    for part in range(parts):
        reaches = []
        for of, limit in zip(sums, limits, strict=True):
            allowed = of[at, part, every] + limit[part]
            reaches.append((of[:, part] <= allowed + ROUNDING * np.abs(allowed)).sum(axis=0) - 1)
        reach = np.maximum(np.min(reaches, axis=0), at)
        if fixed is not None:
            more = fixed[part] + of[np.minimum(reach + 1, layers), part, every] - of[at, part, every]
            following = np.minimum(following, np.where(reach < np.min(reaches[:-1], axis=0), more, np.inf))
        found[part], at = reach - at, reach
    possible &= at == layers
    found[-1] += layers - at
    return _Filled(partitions=found, possible=possible, following=following)


def both_of_parts(pipelines: Pipelines) -> Linear:
    """Forward and backward pass of each part."""
    return Linear(
        fixed=pipelines.forward.fixed + pipelines.backward.fixed,
        layer=pipelines.forward.layer + pipelines.backward.layer,
    )


def of_first_layers(pipelines: Pipelines, layer: Floats) -> Floats:
    """[layers + 1, parts, pipelines], of [kinds, parts, pipelines]."""
    assert pipelines.order is not None
    return np.tensordot(pipelines.order.counts.T.astype(float), layer, axes=1)


def memory_taken(pipelines: Pipelines) -> Floats:
    """Do as `_sums`, for the part of a stage's free memory; of several chunks at their fullest moments."""
    assert pipelines.shares is not None
    shares = pipelines.shares.max(axis=0)
    return of_first_layers(pipelines, np.where(np.isnan(shares), 1.0, shares))


def memory_left(pipelines: Pipelines) -> Floats:
    """[parts, pipelines]; of a stage on which not even no layer fits below 0."""
    chunks = pipelines.parts_count // pipelines.stages
    room = np.where(pipelines.capacity >= 0, FULL / chunks, -1.0)
    return np.tile(room, (chunks, 1))


def _level(both: Linear, pipelines: Pipelines) -> Floats:
    """[pipelines]: what the largest part takes at least, if layers have parts and go where they take least time.

    Only parts below the level take any: of all that are the first ones by what they take without layers, those are
    right for which it is lowest.
    """
    units = Units.of(both.layer, pipelines)
    order = np.argsort(both.fixed, axis=0)
    fixed = np.take_along_axis(both.fixed, order, axis=0)
    layer = np.clip(np.take_along_axis(units.least(both.layer), order, axis=0), TINY, 1 / TINY)
    return ((units.whole + np.cumsum(fixed / layer, axis=0)) / np.cumsum(1 / layer, axis=0)).min(axis=0)


@dataclass(frozen=True, kw_only=True)
class Units:
    """Layers that differ, as amounts of work: a stage takes for any of them at least as long as for its units."""

    of_kind: Floats
    """[kinds, pipelines]: units of a layer of each kind."""
    whole: Floats
    """[pipelines]: of all layers."""

    @classmethod
    def of(cls, layer: Floats, pipelines: Pipelines) -> Units:
        """Give a layer as many units as the parts take seconds for it in the mean, [kinds, parts, pipelines]."""
        assert pipelines.order is not None
        of_kind = layer.mean(axis=1)
        return cls(of_kind=of_kind, whole=np.einsum("kc,k->c", of_kind, pipelines.order.counts[:, -1].astype(float)))

    def least(self, layer: Floats) -> Floats:
        """[parts, pipelines]: what a unit takes at least, of [kinds, parts, pipelines]."""
        units = self.of_kind[:, np.newaxis]
        none = np.where(layer < 0, -np.inf, np.inf)  # of layers without units
        found = np.where(units > 0, layer / np.where(units > 0, units, 1.0), none).min(axis=0)
        return np.where(found < np.inf, found, 0.0)  # where no layer has any, there are no units


def in_units(pipelines: Pipelines) -> tuple[Pipelines, Floats]:
    """Pipelines of alike layers that no partition of these ones beats, and [pipelines] how many they have, which is no
    whole number. Every one has its own memory left out.
    """
    units = Units.of(both_of_parts(pipelines).layer, pipelines)

    def alike(times: Linear) -> Linear:
        return Linear(fixed=times.fixed, layer=units.least(times.layer))

    plain = replace(
        pipelines,
        forward=alike(pipelines.forward),
        backward=alike(pipelines.backward),
        sums=alike(pipelines.unhidden(0).sums),
        optimizer=alike(pipelines.optimizer),
        hidden=None,
        shares=None,
        order=None,
        s_per_byte=None,
    )
    return plain, units.whole
