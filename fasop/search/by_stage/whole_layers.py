"""Seconds below which no partition of one layout into whole layers is, where all layers are alike, proved.

What a stage takes is known exactly for every number of layers, so it may be tested whether any partition keeps all
chains of waits (`fasop.search.by_stage.bounds`) within a time: stage after stage, of all ways to lay so many layers on
the first ones, those with the shortest trips leave most to the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from fasop.search.by_stage.bounds import FAR, left, until_returned
from fasop.search.by_stage.turning import Rounds, held_at_most, most_trips, through_one
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Schedule

HALVED = 9
"""How often `StageTables.least` halves what is open."""


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
        heads = [columns[layout.rank(stage, 0, 0)] for stage in range(layout.stages)]
        tied = max(heads[0].embedding, heads[last].embedding) if last else 0.0
        rows: dict[str, list[Floats]] = {field.name: [] for field in fields(cls) if field.name != "fits"}
        for stage, of_replicas in enumerate(counts):
            ranks = [columns[layout.rank(stage, replica, 0)] for replica in range(layout.replicas[stage])]
            forward, backward = (np.array([getattr(rank, way)[0] for rank in ranks]) for way in ("forward", "backward"))
            step, count = np.array([rank.optimizer for rank in ranks]), np.array(of_replicas)[:, np.newaxis]
            lag = sum(layout.replicas[:stage]) // layout.replicas[stage]
            until = until_returned(schedule, lag, count, first=stage == 0)
            passes = count * (forward + backward)
            way_back = (share if stage else 1.0) * backward
            ahead = float(heads[stage].send_forward[0]) if stage < last else 0.0
            returning = float(heads[stage + 1].send_backward[0]) if stage < last else 0.0
            behind = returning + (0.0 if stage else heads[0].gradients)
            both = (forward + way_back).min(axis=0)
            sums = heads[stage].gradients + (tied if stage in (0, last) else 0.0)
            after = np.array([left(schedule, layout, stage, one, total) for one in of_replicas])[..., np.newaxis]
            passes_left = after[:, 1] * backward
            rows["step"].append(step.min(axis=0))
            rows["alone"].append((step + passes).max(axis=0) + sums)
            rows["there"].append(forward.min(axis=0) + ahead)
            rows["back"].append(way_back.min(axis=0) + behind)
            apart = forward.min(axis=0) + way_back.min(axis=0)
            rows["there_and_back"].append((both if layout.even else apart) + ahead + behind)
            rows["summed"].append(passes.max(axis=0) + sums)
            rows["returned"].append((count * forward + until * backward).max(axis=0) + tied)
            if not (schedule is Schedule.gpipe and not layout.even):  # there they precede the way back
                passes_left = passes_left + after[:, 0] * forward
            rows["left"].append(passes_left.max(axis=0) + tied)
            rows["pair"].append(both if layout.even else apart)
            turned, crossed = _turned(schedule, layout, counts, stage, heads, forward, backward)
            rows["turned"].append(turned + tied)
            rows["crossed"].append(crossed + tied)
            trips, rounds = _rounds(schedule, layout, counts, stage, forward, backward)
            rows["trips"].append(trips)
            rows["rounds"].append(rounds + (2 + trips[:, np.newaxis]) * (ahead + returning) + tied)
        tables = {name: np.array(of_stages) for name, of_stages in rows.items()}
        return cls(fits=np.arange(tables["step"].shape[1]) <= room[:, np.newaxis], **tables)

    def least(self, low: float, high: float) -> float:
        """Seconds from `low` to `high`: no way to share out all layers takes less; more than `high` if none takes up
        to that."""
        if not self.can_share_out(high):
            return math.nextafter(high, math.inf)
        for _ in range(HALVED):
            middle = (low + high) / 2
            low, high = (low, middle) if self.can_share_out(middle) else (middle, high)
        return low

    def can_share_out(self, seconds: float) -> bool:
        """Whether there may be a partition all chains of which keep within these seconds."""
        seconds *= 1 + 1e-9
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
    schedule: Schedule,
    layout: Layout,
    counts: Sequence[Sequence[int]],
    stage: int,
    forward: Floats,
    backward: Floats,
) -> tuple[Floats, Floats]:
    """[3] the `StageTables.trips` of one stage, and [3, layers + 1] its passes in `rounds`; those of its ranks are
    [replicas, layers + 1].

    A micro-batch that another one follows on the next stage may be of another replica.
    """
    one, own, count, total = schedule.definition, layout.replicas[stage], np.array(counts[stage]), sum(counts[0])
    held, late = (one.ahead(_after(layout, stage)) + 1) * own, one.lag(sum(layout.replicas[:stage]) // own)
    far = most_trips((int(count.min()) - 1) * own, held, held)
    trips, passes = np.zeros(3), np.full((3, forward.shape[1]), -FAR)
    if far >= 0:
        trips[1], last = far, (count[:, np.newaxis] - 1) * own
        for way in (0, 1):
            chain = Rounds.of(last, held, held, own, late, int(trips[way]))
            passes[way] = chain.passes(forward, backward, one.input_share).max(axis=0)
    if stage < layout.stages - 1 and total > held:
        step = held - one.ahead(_after(layout, stage + 1)) * layout.replicas[stage + 1]
        trips[2] = most_trips(total - 1, held, step)
        chain = Rounds.of(total - 1, held, step, own, late, int(trips[2]))
        passes[2] = chain.passes(forward.min(axis=0), backward.min(axis=0), one.input_share)
    return trips, passes


def _after(layout: Layout, stage: int) -> int:
    """Count the micro-batches that a stage and all after it hold for one of its replicas, but one."""
    return int(sum(layout.replicas[stage:]) - 1) // layout.replicas[stage]


def _turned(
    schedule: Schedule,
    layout: Layout,
    counts: Sequence[Sequence[int]],
    stage: int,
    heads: Sequence[RankColumns],
    forward: Floats,
    backward: Floats,
) -> tuple[Floats, Floats]:
    """[layers + 1] each: seconds of all passes of a stage there, and then those held back; or of those held there, and
    then all of them back; and the same with messages of the slowest link before it instead of the passes there. On the
    way back what takes longer counts.

    Which replica the last micro-batch that crosses the link comes to is not known.
    """
    share, own, count = schedule.definition.input_share, layout.replicas[stage], np.array(counts[stage])[:, np.newaxis]
    held = held_at_most(schedule, _after(layout, stage), count)
    pair, way_back = forward + share * backward, share * backward
    late, early = (held - 1) * way_back, ((held - 1) * forward, (count - 1) * way_back)
    if stage == 0:
        found = (pair + np.maximum((count - 1) * forward + late, sum(early))).max(axis=0)
        return found, found
    before = max(range(stage), key=lambda number: float(heads[number].busy_forward[0]))
    there, back = float(heads[before].busy_forward[0]), float(heads[before + 1].busy_backward[0])
    peers, senders = layout.replicas[before : before + 2]
    late = np.maximum(late, (through_one(int(held.min()), own, senders) - 1) * back)
    last = np.maximum(early[1], (through_one(int(count.min()), own, senders) - 1) * back)
    by_passes = (pair + np.maximum((count - 1) * forward + late, early[0] + last)).max(axis=0)
    all_there, held_there = (
        (number - 1) * there for number in (counts[before][0], through_one(int(held.min()), own, peers))
    )
    return by_passes, np.maximum((pair + last).max(axis=0) + held_there, all_there + (pair + late).min(axis=0))
