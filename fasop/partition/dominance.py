"""Which pipelines need not be looked at, since another one is as fast with every partition."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from fasop.simulation.linear import Hidden, Linear
from fasop.simulation.pipelines import Pipelines

ROUNDING = 1e-9
"""The part of a pass that differences of times may be off by."""


def never_worse(one: Pipelines, other: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether no partition is slower with `one`, of the same schedule, and all that fit `other` fit it.

    A stage that ends earlier delays nobody. Times are linear in the layers, so what holds for none and for all of them
    holds for any number.
    """
    if one.hidden is None and other.hidden is not None:
        return np.zeros(len(one), bool)
    room = np.minimum(one.capacity, layers) >= np.minimum(other.capacity, layers)
    better: NDArray[np.bool_] = room.all(axis=0) & (one.embedding <= other.embedding)
    better &= _replicas_never_worse(one, other, layers)
    if one.shares is not None and other.shares is not None:
        every = tuple(range(one.shares.ndim - 1))
        better &= (one.shares <= other.shares).all(axis=every) | (_all_of(one, layers) <= 1).all(axis=(0, 1))
    if one.s_per_byte is not None and other.s_per_byte is not None:
        better &= (one.s_per_byte <= other.s_per_byte).all(axis=0)
    better &= (one.hop <= other.hop).all(axis=0)
    better &= (one.occupied <= other.occupied).all(axis=0)
    if one.back is not None and other.back is not None:
        better &= (one.back.hop <= other.back.hop).all(axis=0) & (one.back.busy <= other.back.busy).all(axis=0)
        if one.back.s_per_byte is not None and other.back.s_per_byte is not None:
            better &= (one.back.s_per_byte <= other.back.s_per_byte).all(axis=0)
    for mine, theirs in zip(_stage_times(one), _stage_times(other), strict=True):
        better &= (mine.fixed <= theirs.fixed).all(axis=0)
        if one.order is None:
            better &= (mine.of(np.array(layers)) <= theirs.of(np.array(layers))).all(axis=0)
        else:  # of any kind
            better &= (mine.layer <= theirs.layer).all(axis=(0, 1)) & _again_no_longer(mine, theirs)
    if one.hidden is None or other.hidden is None or not better.any():
        return better
    return better & _hides_enough(one, other, layers)


def _again_no_longer(one: Linear, other: Linear) -> NDArray[np.bool_]:
    """[pipelines]: whether that is so of what is computed again, of any kind."""
    if one.again is None:
        return np.ones(one.fixed.shape[1], bool)
    found = (one.layer + one.again.layer <= other.layer).all(axis=(0, 1))
    if other.again is not None:
        found |= (one.again.most <= other.again.most) & (one.again.layer <= other.again.layer).all(axis=0)
    return np.asarray(found)


def _replicas_never_worse(one: Pipelines, other: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether that is so of all replicas; false where they cannot be compared one by one."""
    found = np.ones(len(one), bool)
    if [own.of.tobytes() for own in one.replicas] == [own.of.tobytes() for own in other.replicas]:
        for mine, theirs in zip(one.replicas, other.replicas, strict=True):
            found[mine.of[~never_worse(mine.lines, theirs.lines, layers)]] = False
    else:
        for own in (*one.replicas, *other.replicas):
            found[own.of] = False
    return found


def _all_of(one: Pipelines, layers: int) -> Floats:
    """[moments, parts, pipelines]: the part of a stage's memory that all layers would take in one of its parts."""
    assert one.shares is not None
    if one.order is None:
        return one.shares * layers
    return np.einsum("mkpc,k->mpc", one.shares, one.order.counts[:, -1])


def _hides_enough(one: Pipelines, other: Pipelines, layers: int) -> NDArray[np.bool_]:
    """[pipelines]: whether the sums of gradients of `one`, whose passes are shorter, never end later for being hidden
    less.

    With GPipe and 1F1B a stage's last backward pass is whole: one that takes longer ends at least so much later, and
    may hide so much more. With other schedules what is left of the sums is compared for every number of layers.
    """
    assert one.hidden is not None
    assert other.hidden is not None
    if one.order is not None:
        return _hides_enough_of_each(one, other)
    if not _halved(one):
        amount = np.arange(layers + 1).reshape(-1, 1, 1)
        enough: NDArray[np.bool_] = np.all(one.hidden.last <= other.hidden.last, axis=0)
        enough &= np.all(one.hidden.beside(amount) <= other.hidden.beside(amount), axis=(0, 1))
        for held in map(np.array, (0, layers)):
            hidden = other.hidden.time.of(held) - one.hidden.time.of(held)
            longer = other.backward.of(held) - one.backward.of(held)
            enough &= (hidden <= longer + ROUNDING * other.backward.of(held)).all(axis=0)
        return enough
    amount = np.arange(layers + 1).reshape(-1, 1, 1)
    return np.all(one.exposed(amount) <= other.exposed(amount), axis=(0, 1))


def _halved(one: Pipelines) -> bool:
    """Whether a stage's last backward pass is not whole: one chunk's, or the part that other stages wait for."""
    return one.schedule.definition.has_chunks or one.schedule.definition.splits_backward


def _hides_enough_of_each(one: Pipelines, other: Pipelines) -> NDArray[np.bool_]:
    """[pipelines]: as `_hides_enough`, if it holds without layers and for those of each kind by themselves."""
    assert one.hidden is not None
    assert other.hidden is not None
    halved = _halved(one)
    enough: NDArray[np.bool_] = np.all(one.hidden.last <= other.hidden.last, axis=0)
    enough &= _waits_no_longer(one.hidden, other.hidden)
    stages = one.stages
    for name, axes in (("fixed", (0,)), ("layer", (0, 1))):
        hidden = getattr(other.hidden.time, name) - getattr(one.hidden.time, name)
        theirs = getattr(other.backward, name)[..., :stages, :]
        longer = 0 * hidden if halved else theirs - getattr(one.backward, name)[..., :stages, :]
        enough &= (hidden <= longer + ROUNDING * theirs).all(axis=axes)
    return enough


def _waits_no_longer(one: Hidden, other: Hidden) -> NDArray[np.bool_]:
    """[pipelines]: whether that is so of what is not the last backward pass's, without layers and for those of each
    kind by themselves."""
    found = np.ones(one.last.shape[1], bool)
    if one.behind is not None:
        zero = np.zeros(1)
        behind = Linear(fixed=zero, layer=zero) if other.behind is None else other.behind
        for mine, theirs in ((one.behind.fixed, behind.fixed), (one.behind.layer, behind.layer)):
            found &= (mine <= theirs).all(axis=tuple(range(mine.ndim - 1)))
    if one.at_turns is not None:
        found &= (one.at_turns <= (0.0 if other.at_turns is None else other.at_turns)).all(axis=0)
    return found


def _stage_times(lines: Pipelines) -> tuple[Linear, ...]:
    return lines.forward, lines.backward, lines.sums, lines.optimizer


def distinct(lines: Pipelines) -> Integers:
    """The first of each that has the same stages and links as others: nodes of a stage may change places."""
    if len(lines) == 1:
        return np.arange(1)
    first = {column: number for number, column in reversed([*enumerate(fingerprints(lines))])}
    return np.sort([*first.values()])


def fingerprints(lines: Pipelines) -> list[tuple[Hashable, ...]]:
    """All that decides what each takes with any partition."""
    replicas: list[list[bytes]] = [[] for _ in range(len(lines))]
    for own in lines.replicas:
        for number, column in zip(own.of, _columns(own.lines), strict=True):
            replicas[number].append(bytes([own.lines.micro_batches == lines.micro_batches]) + column)
    ways_out = None if lines.one_way_out is None else lines.one_way_out.tobytes()
    of_all = lines.schedule, lines.micro_batches, ways_out
    return [(*of_all, column, *sorted(own)) for column, own in zip(_columns(lines), replicas, strict=True)]


def _columns(lines: Pipelines) -> list[bytes]:
    """All numbers of each pipeline, but for its replicas'."""
    hidden = lines.hidden
    parts = [*_stage_times(lines), *([] if hidden is None else filter(None, (hidden.time, hidden.behind)))]
    rows = [*(part.fixed for part in parts), *(part.layer for part in parts), lines.hop, lines.capacity]
    for again in (part.again for part in parts if part.again is not None):
        rows += [again.layer, again.most[np.newaxis]]
    rows += [] if lines.shares is None else [*lines.shares]
    rows += [] if hidden is None else [hidden.last, *([] if hidden.at_turns is None else [hidden.at_turns])]
    rows += [lines.busy] if lines.busy is not None else []
    rows += [lines.s_per_byte] if lines.s_per_byte is not None else []
    if (back := lines.back) is not None:
        rows += [back.hop, back.busy] if back.s_per_byte is None else [back.hop, back.busy, back.s_per_byte]
    if lines.order is not None:
        rows = [row.reshape(-1, len(lines)) for row in rows]
    numbers = np.concatenate([*rows, lines.embedding[np.newaxis], lines.basis[np.newaxis]])
    return [column.tobytes() for column in numbers.T]
