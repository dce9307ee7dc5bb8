"""The public FASOP's simulator of 1F1B, for many pipelines at once: what it computes, not what engines do.

Stages wait until what they send has arrived, as with Megatron-LM (`fasop.simulation.blocking`), but for this:

- only the first stage's activations and the last one's gradients take time; of two messages that neighbours exchange,
  activations do not wait for the next stage, and the first stage does not wait for its own;
- a stage is ready to receive as soon as it has computed, even while it still sends;
- only those activations wait for the next stage that it computes before it alternates, too;
- every stage sums as many gradients as the first one has.

So a stage has two clocks here: when it has computed, and when all its messages are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.simulation.blocking import LinkKind, steps
from fasop.simulation.linear import Layers
from fasop.simulation.loaded import PartitionedPipelines
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.vectorised import Longest, Times, last_of

Masks = tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True, kw_only=True)
class PublicPipelines(Pipelines):
    shares_of_sums: Floats
    """[stages, 1]: for how much longer than the first stage each one sums the first one's gradients."""

    def loaded(self, layers: Layers) -> PartitionedPipelines:
        loaded, stage = super().loaded(layers), np.arange(self.stages)[:, np.newaxis]
        times = loaded.times._replace(
            send_forward=loaded.times.send_forward * (stage == 0),
            send_backward=loaded.times.send_backward * (stage == self.stages - 1),
        )
        known = {field.name: getattr(loaded, field.name) for field in fields(loaded)}
        known.update(times=times, exposed=loaded.exposed[:1] * self.shares_of_sums)
        return _PublicLoaded(**known, shares_of_sums=self.shares_of_sums)


@dataclass(frozen=True, kw_only=True)
class _PublicLoaded(PartitionedPipelines):
    shares_of_sums: Floats

    def _done(self) -> Floats:
        return _run(self.micro_batches, self.times)

    def longest(self, known: Floats | None = None) -> Longest:
        """A stage's sums are of the first one's layers, so that the path ends with the first one's."""
        path = _longest(self.micro_batches, self.times, self.exposed)
        end = np.zeros_like(path.end)
        end[0] = (path.end * self.shares_of_sums).sum(axis=0)
        return path._replace(end=end)


def _run(micro_batches: int, times: Times, noted: list[Masks] | None = None) -> Floats:
    """[stages, pipelines]: when each stage has computed its last pass; `noted` gets what each step waited for."""
    computed, over = times.start.copy(), times.start.copy()
    for kind, one, other, waits in _steps(len(computed), micro_batches):
        if kind < LinkKind.AHEAD:
            if noted is not None:
                noted.append((over[one] > computed[one],))
            computed[one] = np.maximum(computed[one], over[one]) + (times.forward, times.backward)[kind][one]
            continue
        mine, theirs = computed[one], computed[other]
        ahead, both = mine + times.send_forward[one], np.maximum(mine, theirs)
        second = theirs > mine
        if kind is LinkKind.AHEAD:
            here = there = both + times.send_forward[one] if waits else ahead
            from_second = (second & waits, second & waits)
        else:
            here = both + times.send_backward[other]
            there = np.maximum(ahead, here) if kind is LinkKind.BOTH else here
            from_second = (second, second & (here >= there))
        if noted is not None:
            noted.append((*from_second, here > over[one], there > over[other]))
        over[one], over[other] = np.maximum(over[one], here), np.maximum(over[other], there)
    return computed


def _longest(micro_batches: int, times: Times, after: Floats) -> Longest:
    noted: list[Masks] = []
    now = _run(micro_batches, times, noted) + after
    end = last_of(now)
    computed, over, passes = end.copy(), np.zeros_like(end), np.zeros((2, *now.shape))
    for kind, one, other, _ in reversed([*_steps(len(now), micro_batches)]):
        if kind < LinkKind.AHEAD:
            (waited,) = noted.pop()
            passes[kind][one] += computed[one]
            over[one] += np.where(waited, computed[one], 0)
            computed[one] = np.where(waited, 0, computed[one])
            continue
        masks = noted.pop()
        for stages, second, late in zip((one, other), masks[:2], masks[2:], strict=True):
            path = np.where(late, over[stages], 0)
            over[stages] -= path
            computed[one] += np.where(second, 0, path)
            computed[other] += np.where(second, path, 0)
    return Longest(forward=passes[0], backward=passes[1], start=computed + over, end=end, total=now.max(axis=0))


def _steps(stages: int, micro_batches: int) -> Iterator[tuple[LinkKind, slice, slice, bool]]:
    """Simulates a meeting of both stages, and whether activations wait until the second one is ready; each by itself
    where that differs."""
    sent = [0] * stages
    for kind, some in steps(stages, micro_batches):
        following = slice(some.start + 1, some.stop + 1, some.step)
        if kind is not LinkKind.AHEAD:
            yield kind, some, following, True
            continue
        for stage in range(some.start, some.stop, some.step or 1):
            sent[stage] += 1
            ready = sent[stage] <= min(stages - 2 - stage, micro_batches)
            yield kind, slice(stage, stage + 1), slice(stage + 1, stage + 2), ready
