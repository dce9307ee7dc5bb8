"""Chains of waits that turn before the last stage, or again and again: what slow links cost a schedule that holds few
micro-batches.

A rank of 1F1B holds a number of micro-batches at most, so that its next forward pass follows the backward pass of that
many before it. So one micro-batch of it after another goes through all later stages and back: round trips, each with
all messages behind the rank. A shorter round trip turns at the next stage, where the backward pass of an earlier
micro-batch follows: it leads only a few micro-batches on, which may take less than the two messages of a slow link.
Between round trips there may be turns: a backward pass, and the forward pass that it lets the rank take.

Other chains turn once. All micro-batches cross a link on the way to a stage one after another. When the last one has
come, a rank of the stage still has the backward passes of all that it held, whose gradients cross the link on the way
back one after another, too. Likewise, before its first backward pass come as many forward passes, and their messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers, rolled
from fasop.search.by_stage.bounds.chains import Beside
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.simulation.linear import TINY
from megatron_ext.contract.parallel_config import Schedule


class Rounds(NamedTuple):
    """A chain of a stage from its first micro-batch to one of its last, which both go through all later stages and
    back, with other round trips and turns in between.

    A rank's forward pass of micro-batch m + `held` follows its backward pass of m. Where a round trip turns at the next
    stage, the backward pass there is of a micro-batch before, so that it leads from m to m + `step`; else both are one.
    """

    trips: Any
    """Round trips in between."""
    turns: Any
    """Other pairs of passes of the stage."""
    weights: Any
    """How many of its backward passes have their weights' part in the chain, too, where it comes later."""

    @classmethod
    def of(cls, last: Any, held: Any, step: Any, replicas: Any, late: Any, trips: Any) -> Rounds:
        """Let the turns come right before the last round trip.

        Args:
            last: from the first micro-batch to the last one that the chain may have.
            held, step: micro-batches of all `replicas` of the stage.
            late: micro-batches of a rank that weight gradients come later.
            trips: `most_trips` at most.
        """
        turns = (last - held - trips * step) // replicas
        at_trips = np.maximum(0, trips + 1 + -late * replicas // step)
        at_turns = np.clip(turns + 1 - np.maximum(1, late - trips * step // replicas), 0, turns)
        return cls(trips, turns, at_trips + at_turns)

    def passes(self, forward: Any, backward: Any, share: float) -> Any:
        """Seconds of the stage's own passes; `share` of a backward pass precedes the gradient."""
        pairs = (self.trips + self.turns + 2) * (forward + share * backward)
        return pairs + self.weights * (1 - share) * backward


def most_trips(last: Any, held: Any, step: Any) -> Any:
    """Round trips in between; below 0 where there is no such chain."""
    return (last - held) // step


def held_at_most(schedule: Schedule, after: Any, count: Any) -> Any:
    """Micro-batches that a rank with `count` of them holds between its forward and backward passes, at most; it has as
    many backward passes left behind its last forward pass."""
    return np.minimum(count, schedule.definition.ahead(after) + 1)


def through_one(some: Any, replicas: Any, peers: Any) -> Any:
    """How many of `some` micro-batches of one of a stage's `replicas` that one of another stage's has which has most of
    them, at least."""
    return -(-some // (peers // np.gcd(replicas, peers)))


@dataclass(frozen=True, kw_only=True)
class LayoutTurns:
    """Such chains of many layouts: [layouts, stages] each, of which those that a layout has not are behind its last."""

    schedule: Schedule
    layouts: LayoutBatch
    total: int
    """Micro-batches."""
    fewest: Integers
    """Micro-batches of a replica, at least."""
    most: Integers
    """Micro-batches of the first replica."""
    ahead: Integers
    lag: Integers
    hop: Floats
    """Seconds of a message to the next stage, at least, and back."""
    busy: Floats
    """For how long such a message occupies its link, at least."""
    trip: Floats
    """Seconds of a unit of work, there and back."""
    ends: Floats
    """Seconds of the way there and back beside units: of the embedding and the head."""
    passes: tuple[Floats, Floats]
    """Forward and backward: of a unit."""
    ending: Floats
    """[layouts]: seconds behind the first stage's last gradient."""

    def every(self) -> Iterator[Beside]:
        """Give each chain two weights: those beside which its dearest stage needs no other, and its cheapest one."""
        exists = self.layouts.exists
        for price, fixed, stages in (self._turned(), self._round_trips()):
            for dearest in (
                np.where(stages, price, 0.0).max(axis=1),
                np.where(stages & exists, price, np.inf).min(axis=1),
            ):
                yield Beside(price, fixed + self.ending, 1 / np.maximum(dearest, TINY))

    def _turned(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Those which turn at the stage behind the link that takes longest; with the stages that they pass."""
        number, replicas = np.arange(self.hop.shape[1]), self.layouts.replicas
        held = held_at_most(self.schedule, self.ahead, self.fewest)
        senders, sent, busy = (rolled(part, 1, 1) for part in (replicas, self.most, self.busy))
        late = (sent - 1) + (held - 1)
        early = (through_one(held, replicas, senders) - 1) + (self.most - 1)
        messages = 2 * (np.cumsum(self.hop, axis=1) - self.hop) + np.maximum(late, early) * busy
        stage = np.where(self.layouts.exists & (number > 0), messages, -1.0).argmax(axis=1)
        passed = self.layouts.exists & (number <= stage[:, np.newaxis])
        fixed = messages[np.arange(len(stage)), stage] * (stage > 0)
        return np.where(passed, self.trip, 0.0), fixed + np.where(passed, self.ends, 0.0).sum(axis=1), passed

    def _round_trips(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Those of the stage whose messages take longest by them, if they turn at the next stage or at the last one;
        with it and the stages behind it. Nothing where there are none."""
        exists, rows, number = self.layouts.exists, np.arange(len(self.hop)), np.arange(self.hop.shape[1])
        replicas, hop, one = self.layouts.replicas, self.hop, self.schedule.definition
        held, before = (one.ahead(self.ahead) + 1) * replicas, np.cumsum(hop, axis=1) - hop
        behind = hop.sum(axis=1, keepdims=True) - before
        is_last = number >= self.layouts.last[:, np.newaxis]
        step = np.maximum(1, held - np.where(is_last, 0, rolled(one.ahead(self.ahead) * replicas, -1, 1)))
        ways = [(held, (self.most - 1) * replicas, behind), (step, np.full_like(held, self.total - 1), hop)]
        every = [most_trips(last, held, by) for by, last, _ in ways]
        messages = [
            np.where(exists & (trips >= 0), 2 * (before + 2 * behind + trips * of_trip), -1.0)
            for trips, (_, _, of_trip) in zip(every, ways, strict=True)
        ]
        near, place = messages[1] > messages[0], np.maximum(*messages).argmax(axis=1)
        near, none = near[rows, place], np.maximum(*messages)[rows, place] < 0

        def chosen(whole: Any, short: Any) -> Any:
            return np.where(near, short[rows, place], whole[rows, place])

        trips = chosen(*every)
        by, last = (chosen(ways[0][part], ways[1][part]) for part in (0, 1))
        late = one.lag(self.lag[rows, place])
        own = Rounds.of(last, held[rows, place], by, replicas[rows, place], late, trips)
        stage, inner = place[:, np.newaxis], trips[:, np.newaxis]
        passed = (number == stage) | (number == stage + 1) | (number > stage) & ~near[:, np.newaxis]
        times = np.where(number < stage, 1, 2 + inner * passed) * exists
        price = times * self.trip
        forward, backward = (part[rows, place] for part in self.passes)
        price[rows, place] = own.passes(forward, backward, one.input_share)
        price[none] = 0.0
        fixed = chosen(*messages) + (times * self.ends).sum(axis=1)
        return price, np.where(none, 0.0, fixed), exists & (number >= stage)
