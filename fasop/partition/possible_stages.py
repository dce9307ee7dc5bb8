"""Which layers each stage may have in a partition that takes less than some seconds, where layers differ.

A partition is a way through the cuts of the model, and each stage with its layers a step of it, from cut to cut. What
a step takes of passes, sums and update is known exactly, and so are the messages over a cut. The shortest ways to a
cut and on from it, which dynamic programming finds, thus say what every chain of waits (`fasop.partition.chains`) takes
at least that has a step, whatever lies before it and behind. A step with a chain that takes too long is in no such
partition. Without it ways are longer, and further steps go; where none are left, no partition takes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import bounds as compiled
from fasop.costs.arrays import Floats
from fasop.costs.schedules import passes_left
from fasop.simulation.pipelines import FULL, Pipelines

HALVED = 6
"""How often `PossibleStages.least` halves what is open."""
Steps = NDArray[np.bool_]
"""[parts, layers + 1, layers + 1]: whether a part may have the layers from one cut to another one."""


class PossibleStages:
    """Those of a single plan: `steps` fit, and none of its `chains` may take too long."""

    def __init__(self, steps: Steps, chains: Sequence[StepChains]) -> None:
        self._chains, self._known = chains, [(np.inf, steps)]
        """Seconds, fewer each time, and the steps of what takes less, some of which may take less still."""

    @classmethod
    def of(cls, one: Pipelines) -> PossibleStages:
        """`one` is a single pipeline; where its stages have several chunks no chains are known."""
        every = [own.lines.take(np.array([column])) for own in one.replicas for column in range(len(own.lines))]
        alone = (every or [one]) if one.parts_count == one.stages else []
        return cls(_fitting(one), [StepChains.of(lines) for lines in alone])

    def below(self, seconds: float) -> Steps:
        """List the steps that partitions of less than so many seconds may have: none where there is no such
        partition."""
        found = next(steps for known, steps in reversed(self._known) if known >= seconds)
        while found.any():
            before = found
            for chains in self._chains:
                found = chains.within(found, seconds)
            if (found == before).all():
                break
        if seconds < self._known[-1][0] and found.any():
            self._known.append((seconds, found))
        return found

    def least(self, low: float, high: float) -> float:
        """Seconds below which no partition is, as far as chains say so, from `low` to `high`."""
        if low >= high or not self.below(high).any():
            return high
        for _ in range(HALVED if self._chains else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if self.below(middle).any() else (middle, high)
        return low


def _fitting(one: Pipelines) -> Steps:
    """List the steps that fit into memory; of several chunks, if a stage's others are empty."""
    assert one.shares is not None
    assert one.order is not None
    counts, parts, cut = _layers_of_steps(one)[:, 0], one.parts_count, np.arange(one.order.layers + 1)
    taken = np.einsum("mkp,kn->mpn", np.nan_to_num(one.shares[..., 0], nan=1.0), counts).max(axis=0)
    fits = (taken <= FULL) & np.tile(one.capacity[:, 0] >= 0, parts // one.stages)[:, np.newaxis]
    return np.asarray(fits.reshape(parts, len(cut), -1) & (cut[:, np.newaxis] <= cut))


def _layers_of_steps(one: Pipelines) -> Floats:
    """[kinds, 1, steps]: layers of each kind; of steps backwards less than none."""
    assert one.order is not None
    counts = one.order.counts.astype(float)
    between: Floats = counts[:, np.newaxis] - counts[..., np.newaxis]
    return between.reshape(len(counts), 1, -1)


@dataclass(frozen=True, kw_only=True)
class StepChains:
    """What steps take in the chains of a single pipeline, whose stages have one chunk: [stages, layers + 1, layers + 1]
    each, from cut to cut."""

    begin: Floats
    """[layers + 1, layers + 1]: what precedes the first stage's first pass, and follows its last one."""
    update: Floats
    """What a stage does before its first pass."""
    there: Floats
    """A micro-batch on its way through the stage to the next one."""
    trip: Floats
    """The same, and back."""
    last: Floats
    """All passes of the stage, from the first one until its last gradient has left; or, where messages to both
    neighbours leave by one link, for how long all of these occupy it, but for a message back."""
    turned: Floats
    """Those passes that follow when the first gradient has left; or for how long the messages of all micro-batches but
    one occupy the link to the next stage."""
    summed: Floats
    """All passes of the stage, and what follows the last one."""

    @classmethod
    def of(cls, one: Pipelines) -> StepChains:
        assert one.order is not None
        stages, count, held, cuts = one.stages, one.micro_batches, _layers_of_steps(one), one.order.layers + 1
        forward, backward, exposed, update = (
            seconds.reshape(stages, cuts, cuts)
            for seconds in (one.forward.of(held), one.backward.of(held), one.exposed(held), one.optimizer.of(held))
        )
        number, half = np.arange(float(stages)).reshape(-1, 1, 1), one.schedule.definition.input_share
        owed = np.where(number > 0, np.minimum(number + 1, count), 0) * (1 - half)
        left = passes_left(one.schedule, stages, 1, count)
        tied = np.where((number == 0) | (number == stages - 1), one.embedding, 0.0)
        ahead, busy, back, busy_back = _messages(one)
        last = count * forward + (count - owed) * backward
        if one.one_way_out is not None:
            some = np.flatnonzero(one.one_way_out[1 : stages - 1]) + 1
            both = count * (busy[some, np.newaxis] + busy_back[some - 1][..., np.newaxis])
            last[some] = np.maximum(last[some], both - back[some - 1][..., np.newaxis])
        passes = left.forward.reshape(-1, 1, 1) * forward + left.backward.reshape(-1, 1, 1) * backward
        begin = update[0] + exposed[0] + tied[0]
        begin[1:] = np.inf  # the first stage has the first layers
        return cls(
            begin=begin,
            update=update,
            there=forward + ahead[:, np.newaxis],
            trip=forward + np.where(number > 0, half, 1.0) * backward + (ahead + back)[:, np.newaxis],
            last=last,
            turned=np.maximum(passes, (count - 1) * np.maximum(busy, busy_back)[:, np.newaxis]),
            summed=count * (forward + backward) + exposed + tied,
        )

    def within(self, steps: Steps, seconds: float) -> Steps:
        """List those of the steps of which every chain may take less than so many seconds, if there are no others."""
        if hasattr(compiled, "possible_steps"):
            own = {name: np.ascontiguousarray(part) for name, part in vars(self).items()}
            left = compiled.possible_steps(np.ascontiguousarray(steps).view(np.uint8), seconds, **own)
            return np.asarray(left.view(np.bool_))
        stages, cuts = len(steps), steps.shape[1]
        found, spans = np.zeros_like(steps), _spans(steps)
        onward = np.full((stages + 1, cuts), np.inf)
        onward[stages, -1] = 0.0
        for stage in range(stages - 1, 0, -1):
            begins, ends = spans[stage]
            trip = self.trip[stage, begins, ends] + onward[stage + 1, ends]
            onward[stage, begins] = np.where(steps[stage, begins, ends], trip, np.inf).min(axis=1)
        reached = arrived = np.zeros(cuts)
        for stage, (begins, ends) in enumerate(spans):
            here = stage, begins, ends
            before = reached[begins, np.newaxis] if stage else self.begin[begins, ends]
            way, there = before + self.trip[here], np.maximum(arrived[begins, np.newaxis], self.update[here])
            allowed = steps[here] & (way + onward[stage + 1, ends] + self.turned[here] < seconds)
            allowed &= (before + self.last[here] < seconds) & (there + self.summed[here] < seconds)
            found[here] = allowed
            reached, arrived = np.full((2, cuts), np.inf)
            reached[ends] = np.where(allowed, way, np.inf).min(axis=0)
            arrived[ends] = np.where(allowed, there + self.there[here], np.inf).min(axis=0)
        return found


def _spans(steps: Steps) -> list[tuple[slice, slice]]:
    """The cuts at which steps of each stage begin and end, from the first to the last one."""
    rows = []
    for axis in (2, 1):
        some: NDArray[np.bool_] = np.any(steps, axis=axis)
        first, last = some.argmax(axis=1), some.shape[1] - some[:, ::-1].argmax(axis=1)
        rows.append([slice(*pair) for pair in zip(first.tolist(), last.tolist(), strict=True)])
    return [*zip(*rows, strict=True)]


def _messages(one: Pipelines) -> tuple[Floats, Floats, Floats, Floats]:
    """[stages, layers + 1] each, of the cut behind a stage: a message ahead, for how long it occupies its link, and the
    same of one back. Nothing leaves the last stage."""
    assert one.order is not None
    assert one.s_per_byte is not None
    longer, inner = one.order.extra * one.s_per_byte, np.arange(one.stages)[:, np.newaxis] < one.stages - 1
    ahead, busy = one.hop + longer, one.occupied + longer
    back, busy_back = (ahead, busy) if one.back is None else one.back.messages(one.order.extra + np.zeros_like(ahead))
    return tuple(np.where(inner, seconds, 0.0) for seconds in (ahead, busy, back, busy_back))  # type: ignore[return-value]
