"""Whether any order of the nodes, with any whole layers per stage, may take less than some seconds: by dynamic
programming over chains of waits that turn back at any stage.

All micro-batches pass the slowest stage on the way to stage i one after another, and the last one still goes back from
there. Before its first backward pass, stage i has some forward passes; so there the first gradient waits for as many of
the slowest stage on the way, and behind it comes what any of these stages still has left (`fasop.partition.bounds`). A
third chain goes to a stage and has all passes of it.

For these chains the stages before i are known by their longest forward pass and the most that any has left. So for each
number of layers, and each of those, the shortest trip is found from the first stage on, for all orders at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers, distinct
from fasop.costs.training import Training
from fasop.search.bounds.order_bounds import Units
from fasop.simulation.linear import Linear
from fasop.simulation.pipelines import Pipelines
from megatron_ext.contract.schedule.schedules import PipelineSchedule

RESTS, FORWARDS = 32, 24
"""Amounts left, and longest forward passes, that are told apart, at most."""


@dataclass(frozen=True, kw_only=True)
class WholeChains:
    """Plans with one option. `most` units may be of each kind."""

    schedule: PipelineSchedule
    micro_batches: int
    layers: int
    units: Units
    most: Sequence[int]
    capacity: Integers | None = None
    """[kinds, stages]: the layers that each has room for, if that is known."""

    @classmethod
    def of_orders(cls, one: Training, most: Sequence[int], units: Units) -> WholeChains:
        """In all orders of so many units of each kind; `one` is any of the options that take no less than `units`."""
        return cls(
            schedule=one.parallel.schedule.definition,
            micro_batches=one.parallel.micro_batches,
            layers=one.blocks.layers,
            units=units,
            most=most,
        )

    @classmethod
    def of_pipeline(cls, lines: Pipelines, layers: int) -> WholeChains:
        """Make those of a single pipeline, whose stages have one chunk, and whose layers are alike."""
        return cls(
            schedule=lines.schedule.definition,
            micro_batches=lines.micro_batches,
            layers=layers,
            units=Units.of_pipeline(lines, layers),
            most=(1,),
            capacity=lines.capacity.T,
        )

    @property
    def steps(self) -> int:
        """How many stages a look goes through, in all orders."""
        stages = self.units.within.shape[1] // self.units.hop.shape[2]
        orders = math.prod(number + 1 for number in self.most) * len(self.most)
        return int(orders * stages)

    def bound(self, least: float, enough: float, looks: int) -> tuple[float, int]:
        """Seconds below which none is, from `least` to `enough`, by so many looks at most, and how many were needed:
        the first one is at `enough`."""
        until = above = enough
        for look in range(1, looks + 1):
            if self.may_be_below(until):
                above = until
            else:
                least = until
            if least >= enough:
                return enough, look
            until = (least + above) / 2
        return least, looks

    def may_be_below(self, seconds: float) -> bool:
        """Whether the chains allow any order and layers to take less."""
        table = _Table.of(self, seconds)
        if table is None:
            return False
        begun: dict[tuple[int, ...], dict[int, Floats]] = {(0,) * len(self.most): {}}
        count = self.units.hop.shape[2]
        for place in range(count):
            reached: dict[tuple[int, ...], dict[int, Floats]] = {}
            for used, lasts in begun.items():
                for kind, most in enumerate(self.most):
                    if used[kind] == most:
                        continue
                    arrived = table.begun(self.units.start[kind])
                    if place:
                        hop = self.units.hop[:, kind, place - 1]
                        arrived = np.minimum.reduce([trip + hop[last] for last, trip in lasts.items()])
                    if np.isfinite(through := table.through(arrived, kind, place)).any():
                        after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                        reached.setdefault(after, {})[kind] = through
            begun = reached
        return any(bool(np.isfinite(trip[..., -1]).any()) for lasts in begun.values() for trip in lasts.values())


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What stages take with each number of layers, [kinds, stages, layers + 1]; the trips are [forwards, rests,
    layers + 1], infinite where none is below `seconds`."""

    chains: WholeChains
    seconds: float
    fits: NDArray[np.bool_]
    """Whether a stage may have so many layers."""
    trip: Floats
    own: Floats
    forwards: Floats
    """The longest forward pass so far, at least."""
    rests: Floats
    """The longest rest so far, at least: but for the first one, which some stage has of all."""
    forward_of: Integers
    """The numbers of a stage's."""
    rest_of: Integers

    @classmethod
    def of(cls, chains: WholeChains, seconds: float) -> _Table | None:
        """None where layers have no room."""
        units, layers, amounts = chains.units, chains.layers, np.arange(chains.layers + 1)

        def with_layers(part: Linear) -> Floats:
            return part.fixed[..., np.newaxis] + part.layer[..., np.newaxis] * amounts

        forward, trip, own, left, summed = (
            with_layers(part) for part in (units.forward, units.trip, units.own, units.left, units.summed)
        )
        shortest = units.start.min() + layers * units.trip.layer.min() + units.fixed.min(axis=0).sum()
        fits = (summed < seconds) & (shortest + left < seconds)
        if chains.capacity is not None:
            fits &= amounts <= chains.capacity[..., np.newaxis]
        rests = distinct(left[fits])
        room = [np.where(fits & (left <= rest), amounts, 0).max(axis=(0, 2)).sum() for rest in rests]
        rests = rests[np.searchsorted(room, layers) :]
        if not len(rests) or not fits.any(axis=(0, 2)).all():
            return None
        forwards = np.append(0.0, distinct(np.floor(forward[fits] * 1e12) / 1e12))
        forwards, rests = _some(forwards, FORWARDS), _some(rests, RESTS)
        return cls(
            chains=chains,
            seconds=seconds,
            fits=fits,
            trip=trip,
            own=own,
            forwards=forwards,
            rests=rests,
            forward_of=np.searchsorted(forwards, forward, side="right") - 1,
            rest_of=np.maximum(np.searchsorted(rests, left, side="right") - 1, 0),
        )

    def begun(self, start: float) -> Floats:
        """Before the first stage, if such time follows the last one."""
        found = np.full((len(self.forwards), len(self.rests), self.chains.layers + 1), np.inf)
        found[0, 0, 0] = start
        return found

    def through(self, trip: Floats, kind: int, unit: int) -> Floats:
        """The trips through a unit of that kind as well."""
        within, schedule, count = self.chains.units.within, self.chains.schedule, self.chains.micro_batches
        stages, units = within.shape[1], self.chains.units.hop.shape[2]
        for stage in range(unit * stages // units, (unit + 1) * stages // units):
            found = np.full_like(trip, np.inf)
            for number in np.nonzero(self.fits[kind, stage])[0]:
                most = self.seconds - self.own[kind, stage, number]
                before = np.where(trip < most, trip, np.inf)[..., : trip.shape[-1] - number]
                longest, rest = self.forward_of[kind, stage, number], self.rest_of[kind, stage, number]
                before = _raised(_raised(before, longest, 0), rest, 1) + self.trip[kind, stage, number]
                better = found[longest:, rest:, number:]
                np.minimum(better, before, out=better)
            rests = self.rests if stage == stages - 1 else np.append(0.0, self.rests[1:])
            forwards = self.forwards[:, np.newaxis]
            first = int(min(count, schedule.overlapped(stages - 1 - stage))) - 1
            after = np.maximum((count - 1) * forwards, first * forwards + rests)[..., np.newaxis]
            trip = np.where(found + after < self.seconds, found + within[kind, stage], np.inf)
        return trip


def _some(values: Floats, most: int) -> Floats:
    """Choose so many values of all in order, with the first."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values), most, endpoint=False).astype(int)]


def _raised(trip: Floats, number: int, axis: int) -> Floats:
    """Give those of lower numbers along an axis this one, of which the shortest counts."""
    first = np.take(trip, range(number + 1), axis).min(axis=axis, keepdims=True)
    return np.concatenate([first, np.take(trip, range(number + 1, trip.shape[axis]), axis)], axis=axis)
