"""Seconds below which no partition of one layout into whole layers is, where all layers are alike, proved.

What a stage takes is known exactly for every number of layers, so it may be tested whether any partition keeps all
chains of waits (`fasop.search.by_stage.bounds.chains`) within a time: stage after stage, of all ways to lay so many
layers on the first ones, those with the shortest trips leave most to the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import layouts as compiled
from fasop.costs.arrays import Floats, Integers
from fasop.search.by_stage.bounds.chains import FAR, left, until_returned
from fasop.search.by_stage.bounds.layout_batch import UnlikeReplicas
from fasop.search.by_stage.bounds.turning import Rounds, held_at_most, most_trips, through_one
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Schedule

ROUNDING = 1e-9
"""The part of a time by which sums of the same times may differ."""
HALVED = 9
"""How often `StageTables.least` halves what is open."""
OF_TRIP = (
    *("step", "there", "back", "there_and_back", "summed", "returned"),
    *("pair", "turned", "crossed", "trips", "rounds"),
)
"""The tables that decide about the shortest trip."""
OF_ONE = "step", "alone", "there", "there_and_back", "summed", "returned", "left"
"""The tables that bound one partition."""


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Seconds of each stage with each number of layers: [stages, layers + 1] each, but for `trips` and
    `rounds`."""

    fits: NDArray[np.bool_]
    """Whether memory has room for them."""
    step: Floats
    """The optimizer's, with which each rank begins."""
    alone: Floats
    """All that a stage does: its step, its passes, and the sums of its gradients."""
    there: Floats
    """A micro-batch on its way through the stage to the next one."""
    back: Floats
    """A micro-batch on its way from the next stage back; of the first stage until its gradients are summed."""
    there_and_back: Floats
    """Both, where the same replica may not be the fastest of both."""
    summed: Floats
    """All passes of the stage, and the sums of its gradients."""
    returned: Floats
    """Its passes until its last gradient leaves it, and what follows the first stage's sums."""
    left: Floats
    """Its passes that follow when a micro-batch has gone there and back, and what follows the first stage's sums."""
    pair: Floats
    """A micro-batch on its way there and back, without messages, as in `there_and_back`."""
    turned: Floats
    """Its passes of chains that turn at it (`_turned`), with what follows the first stage's sums."""
    crossed: Floats
    """The same of those that begin with messages, which do not wait for its step."""
    trips: Floats
    """[stages, 3]: round trips in between of `Rounds`: none, as many as can be, and as many as can turn at the next
    stage."""
    rounds: Floats
    """[stages, 3, layers + 1]: its own passes and messages by then, with what follows the first stage's sums; where
    there is no such chain, nothing counts."""

    @classmethod
    def of(
        cls,
        columns: Sequence[RankColumns],
        schedule: Schedule,
        layout: Layout,
        counts: Sequence[Sequence[int]],
        room: Integers,
    ) -> StageTables:
        """`columns` are of each rank for every number of layers on its stage, `counts` the micro-batches of each
        replica by stage, and `room` [stages] the layers that fit."""
        share, total, last = schedule.definition.input_share, sum(counts[0]), layout.stages - 1
        unlike = UnlikeReplicas.of(layout, counts, [*map(id, columns)])
        taken = [[columns[rank] for rank in some] for some in unlike.ranks.tolist()]
        forward, backward = (
            np.array([[getattr(rank, way)[0] for rank in some] for some in taken]) for way in ("forward", "backward")
        )
        step = np.array([[rank.optimizer for rank in some] for some in taken])
        heads, count = [some[0] for some in taken], unlike.counts[..., np.newaxis]
        tied = max(heads[0].embedding, heads[last].embedding) if last else 0.0
        at_ends = np.zeros((layout.stages, 1))
        at_ends[[0, last]] = tied
        first = (np.arange(layout.stages) == 0)[:, np.newaxis, np.newaxis]
        ahead = np.array([*(float(one.send_forward[0]) for one in heads[:last]), 0.0])[:, np.newaxis]
        returning = np.array([*(float(one.send_backward[0]) for one in heads[1:]), 0.0])[:, np.newaxis]
        way_back = np.where(first, 1.0, share) * backward
        behind = returning + first[:, 0] * heads[0].gradients
        together, apart = (forward + way_back).min(axis=1), forward.min(axis=1) + way_back.min(axis=1)
        pair, passes = together if layout.even else apart, count * (forward + backward)
        sums = np.array([one.gradients for one in heads]) + at_ends
        until = until_returned(schedule, unlike.lag[:, np.newaxis, np.newaxis], count, first=first)
        after = [part[..., np.newaxis] for part in left(schedule, unlike, total)]
        passes_left = after[1] * backward
        if not (schedule is Schedule.gpipe and not layout.even):  # there they precede the way back
            passes_left = passes_left + after[0] * forward
        turned, crossed = _turned(schedule, unlike, heads, forward, backward)
        trips, rounds = _rounds(schedule, unlike, total, forward, backward)
        messages = (2 + trips) * (ahead + returning)
        return cls(
            fits=np.arange(step.shape[2]) <= room[:, np.newaxis],
            step=step.min(axis=1),
            alone=(step + passes).max(axis=1) + sums,
            there=forward.min(axis=1) + ahead,
            back=way_back.min(axis=1) + behind,
            there_and_back=pair + ahead + behind,
            summed=passes.max(axis=1) + sums,
            returned=(count * forward + until * backward).max(axis=1) + tied,
            left=passes_left.max(axis=1) + tied,
            pair=pair,
            turned=turned + tied,
            crossed=crossed + tied,
            trips=trips,
            rounds=rounds + messages[..., np.newaxis] + tied,
        )

    def least(self, low: float, high: float) -> float:
        """Seconds from `low` to `high`: no way to share out all layers takes less; more than `high` if none takes up
        to that."""
        if not self.can_share_out(high):
            return math.nextafter(high, math.inf)
        for _ in range(HALVED):
            middle = (low + high) / 2
            low, high = (low, middle) if self.can_share_out(middle) else (middle, high)
        return low

    def least_of(self, partitions: Integers) -> Floats:
        """[partitions], of [stages, partitions] layers that are in the tables: seconds that each takes at least.

        The first stage steps its optimizer before the first micro-batch, which goes through all stages before one, or
        also comes back through them, beside all passes of this one; or through all stages and back, before the passes
        that one has left.
        """
        if hasattr(compiled, "least_of"):
            tables: dict[str, Floats] = {name: getattr(self, name) for name in OF_ONE}
            return compiled.least_of(partitions, **tables) * (1 - ROUNDING)
        rows = np.arange(len(partitions))[:, np.newaxis]
        there, trip = (np.cumsum(table[rows, partitions], axis=0) for table in (self.there, self.there_and_back))
        none = np.zeros((1, partitions.shape[1]))
        before, both_before = (np.concatenate([none, passed[:-1]]) for passed in (there, trip))
        longest = np.maximum.reduce(
            [
                before + self.summed[rows, partitions],
                both_before + self.returned[rows, partitions],
                trip[-1] + self.left[rows, partitions],
            ]
        )
        stepped = self.step[0, partitions[0]] + longest.max(axis=0)
        least: Floats = np.maximum(stepped, self.alone[rows, partitions].max(axis=0)) * (1 - ROUNDING)
        return least

    def can_share_out(self, seconds: float) -> bool:
        """Whether there may be a partition all chains of which keep within these seconds."""
        seconds *= 1 + ROUNDING
        allowed = self.fits & (self.alone <= seconds)
        while allowed.any(axis=1).all():
            shortest = self._shortest_trip(allowed, seconds)
            within = allowed & (shortest + self.left <= seconds)
            if math.isinf(shortest) or (within == allowed).all():
                return math.isfinite(shortest)
            allowed = within
        return False

    def _shortest_trip(self, allowed: NDArray[np.bool_], seconds: float) -> float:
        """Seconds until a micro-batch has gone through all stages and back, at least, where stages have an allowed
        number of layers; infinite if some chain is always longer than `seconds`.

        A micro-batch waits at every stage for its optimizer step.
        """
        if hasattr(compiled, "shortest_trip"):
            return compiled.shortest_trip(
                allowed.view(np.uint8), seconds, **{name: getattr(self, name) for name in OF_TRIP}
            )
        whole, most = allowed.shape[1], int(np.flatnonzero(allowed.any(axis=0))[-1]) + 1
        before = np.arange(whole)[:, np.newaxis] - np.arange(most)
        before[before < 0] = whole  # where all is infinite
        later, near = self._later_trips(allowed, before)
        # There, back, there and back, and that with no step but the first one, by the layers of the stages before.
        ways = np.full((4, whole + 1), np.inf)
        ways[:, 0] = 0.0
        for stage, fine in enumerate(allowed[:, :most]):
            step = self.step[stage, :most]
            there, back, both, free = ways[:, before]
            there = np.maximum(there, step)
            both = np.maximum(both, step + back)
            free = free if stage else both
            fits = fine & (there + self.summed[stage, :most] <= seconds)
            fits &= both + self.returned[stage, :most] <= seconds
            behind = (2 * later[stage], (2 + self.trips[stage, 1]) * later[stage], near[stage])
            for passes, others in zip(self.rounds[stage, :, :most], behind, strict=True):
                fits &= both + passes + others <= seconds
            fits &= (both + self.turned[stage, :most] <= seconds) & (free + self.crossed[stage, :most] <= seconds)
            there += self.there[stage, :most]
            back += self.back[stage, :most]
            both, free = both + self.there_and_back[stage, :most], free + self.there_and_back[stage, :most]
            ways[:, :whole] = np.where(fits, [there, back, both, free], np.inf).min(axis=2)
        return float(ways[2, whole - 1])

    def _later_trips(self, allowed: NDArray[np.bool_], before: Integers) -> tuple[Floats, Floats]:
        """[stages, layers + 1, 1] each: seconds of a micro-batch through all later stages and back, at least, if so
        many layers lie on all others; and twice that, with round trips in between that turn at the next stage."""
        whole, most = allowed.shape[1], before.shape[1]
        found, near, way = [], [np.zeros(whole)], np.full(whole + 1, np.inf)
        way[0] = 0.0
        for stage in range(len(allowed) - 1, -1, -1):
            found.append(way[whole - 1 :: -1])
            trip = np.where(allowed[stage, :most], self.there_and_back[stage, :most], np.inf)
            if stage:
                rounds = 2 * (way[before] + trip) + self.trips[stage - 1, 2] * self.pair[stage, :most]
                near.append(rounds.min(axis=1)[::-1])
            way = np.append((way[before] + trip).min(axis=1), np.inf)
        return np.array(found[::-1])[..., np.newaxis], np.array(near[::-1])[..., np.newaxis]


def _rounds(
    schedule: Schedule, stages: UnlikeReplicas, total: int, forward: Floats, backward: Floats
) -> tuple[Floats, Floats]:
    """[stages, 3] the `StageTables.trips`, and [stages, 3, layers + 1] the passes of stages in `rounds`, of all `total`
    micro-batches; those of replicas are [stages, replicas, layers + 1].

    A micro-batch that another one follows on the next stage may be of another replica.
    """
    one, own = schedule.definition, stages.own
    before, late = one.ahead(stages.after) * own, one.lag(stages.lag)
    held = before + own
    trips, passes = np.zeros((len(own), 3)), np.full((len(own), 3, forward.shape[2]), -FAR)
    far = most_trips((stages.counts.min(axis=1) - 1) * own, held, held)
    some = np.flatnonzero(far >= 0)
    trips[some, 1] = far[some]
    of_some = some, np.newaxis, np.newaxis
    last = (stages.counts[some, :, np.newaxis] - 1) * own[of_some]
    for way, times in enumerate((np.zeros_like(far), far)):
        chain = Rounds.of(last, held[of_some], held[of_some], own[of_some], late[of_some], times[of_some])
        passes[some, way] = chain.passes(forward[some], backward[some], one.input_share).max(axis=1)
    some = np.flatnonzero(held[:-1] < total)
    step = held[some] - before[some + 1]
    trips[some, 2] = far = most_trips(total - 1, held[some], step)
    chain = Rounds.of(
        *(part[:, np.newaxis] for part in (0 * far + total - 1, held[some], step, own[some], late[some], far))
    )
    passes[some, 2] = chain.passes(forward[some].min(axis=1), backward[some].min(axis=1), one.input_share)
    return trips, passes


def _turned(
    schedule: Schedule, stages: UnlikeReplicas, heads: Sequence[RankColumns], forward: Floats, backward: Floats
) -> tuple[Floats, Floats]:
    """[stages, layers + 1] each: seconds of all passes of a stage there, and then those held back; or of those held
    there, and then all of them back; and the same with messages of the slowest link before it instead of the passes
    there. On the way back what takes longer counts. `heads` are ranks of each stage.

    Which replica the last micro-batch that crosses the link comes to is not known.
    """
    share, own, count = schedule.definition.input_share, stages.own, stages.counts[..., np.newaxis]
    held = held_at_most(schedule, stages.after[:, np.newaxis, np.newaxis], count)
    pair, way_back = forward + share * backward, share * backward
    busy, busy_back = (np.array([getattr(one, f"busy_{way}")[0] for one in heads]) for way in ("forward", "backward"))
    before = np.array([0, *(int(busy[:stage].argmax()) for stage in range(1, len(own)))])
    behind = np.minimum(before + 1, len(own) - 1)
    some, every = held.min(axis=(1, 2)), stages.counts.min(axis=1)
    there, back = busy[before], busy_back[behind]
    there[0] = back[0] = 0.0

    def crossing(number: Integers, others: Integers, seconds: Floats) -> Floats:
        """[stages, 1]: seconds of messages between the first and the last of so many micro-batches of a replica."""
        return ((through_one(number, own, others) - 1) * seconds)[:, np.newaxis]

    held_there, sent = crossing(some, own[before], there), (stages.counts[before, 0] - 1) * there
    late = np.maximum((held - 1) * way_back, crossing(some, own[behind], back)[..., np.newaxis])
    last = np.maximum((count - 1) * way_back, crossing(every, own[behind], back)[..., np.newaxis])
    by_passes = (pair + np.maximum((count - 1) * forward + late, (held - 1) * forward + last)).max(axis=1)
    crossed = np.maximum((pair + last).max(axis=1) + held_there, sent[:, np.newaxis] + (pair + late).min(axis=1))
    crossed[0] = by_passes[0]
    return by_passes, crossed
