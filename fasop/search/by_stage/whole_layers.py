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
from fasop.costs.schedules import forward_left
from fasop.search.by_stage.bounds import FAR, left, until_returned
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.parallel_config import Schedule

HALVED = 9
"""How often `StageTables.least` halves what is open."""


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Seconds of each stage with each number of layers: [stages, layers + 1] each."""

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
    twice: Floats
    """Its passes if its first micro-batch goes through the later stages and back and, all others in between, its last
    one does; with what follows the first stage's sums. Where its last forward pass precedes the first backward one,
    this is no chain, and nothing counts."""

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
            rounds = forward_left(schedule, (sum(layout.replicas[stage:]) - 1) // layout.replicas[stage], count)
            weights = np.maximum(0, rounds - lag) * (1 - share)
            twice = (1 + rounds) * (forward + share * backward) + weights * backward + tied
            rows["twice"].append(np.where(rounds > 0, twice, -FAR).max(axis=0))
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
        later = self._later_trips(allowed, before)
        ways = np.full((3, whole + 1), np.inf)  # there, back, and there and back, by the layers of the stages before
        ways[:, 0] = 0.0
        for stage, fine in enumerate(allowed[:, :most]):
            step = self.step[stage, :most]
            there, back, both = ways[:, before]
            there = np.maximum(there, step)
            both = np.maximum(both, step + back)
            fits = fine & (there + self.summed[stage, :most] <= seconds)
            fits &= both + self.returned[stage, :most] <= seconds
            fits &= both + self.twice[stage, :most] + 2 * later[stage] <= seconds
            there += self.there[stage, :most]
            back += self.back[stage, :most]
            both += self.there_and_back[stage, :most]
            ways[:, :whole] = np.where(fits, [there, back, both], np.inf).min(axis=2)
        return float(ways[2, whole - 1])

    def _later_trips(self, allowed: NDArray[np.bool_], before: Integers) -> Floats:
        """[stages, layers + 1, 1]: seconds of a micro-batch through all later stages and back, at least, if so many
        layers lie on all others."""
        whole, most = allowed.shape[1], before.shape[1]
        found, way = [], np.full(whole + 1, np.inf)
        way[0] = 0.0
        for fine, trip in zip(allowed[::-1, :most], self.there_and_back[::-1, :most], strict=True):
            found.append(way[whole - 1 :: -1])
            way = np.append(np.where(fine, way[before] + trip, np.inf).min(axis=1), np.inf)
        return np.array(found[::-1])[..., np.newaxis]
