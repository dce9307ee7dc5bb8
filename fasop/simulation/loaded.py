"""Pipelines with a partition: what their stages take, and the iteration that follows from it.

An iteration is from the moment at which all ranks know the norm of the gradient, where they wait for each other, to the
same moment of the next one: each stage steps its optimizer, goes through the schedule, sums its gradients; then first
and last stage sum the embedding's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasop.costs.arrays import Floats
from fasop.simulation import blocking
from fasop.simulation.vectorised import Longest, Times, Traffic, ends, longest
from megatron_ext.contract.parallel_config import Schedule


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the time of an iteration goes, by pipeline."""

    total: Floats
    """From the end of one iteration to the end of the next."""
    pipeline: Floats
    """Until the last backward pass has ended."""
    sums: Floats
    """The rest, until all gradients are summed over the replicas."""
    embedding: Floats
    """The rest, until the embedding's are summed too."""
    optimizer: Floats
    """The longest of the stages' steps. A stage that is done early begins the next iteration early, so that this
    overlaps with `pipeline`."""

    def of(self, column: int) -> Parts:
        """Those of one pipeline."""
        here = slice(column, column + 1)
        return Parts(**{name: seconds[here] for name, seconds in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PartitionedPipelines:
    """What the stages of pipelines take with their layers."""

    schedule: Schedule
    micro_batches: int
    blocking: bool
    """Whether stages wait until what they send has arrived."""
    times: Times
    traffic: Traffic
    exposed: Floats
    """[stages, pipelines]: seconds from a stage's last backward pass until its gradients are summed."""
    embedding: Floats
    """[pipelines]: seconds of summing the embedding's, from when both the first and the last stage have theirs."""

    def iteration(self, limit: Floats | None = None) -> Floats:
        """[pipelines]: seconds. What is not below its `limit` may come out too low, but not below the limit."""
        if limit is None or (self.blocking and not self.schedule.definition.has_chunks):
            return self._summed(self._done())[1]
        schedule, count, times, traffic = self.schedule, self.micro_batches, self.times, self.traffic
        if not self.blocking:
            return self._summed(ends(schedule, count, times, traffic, lambda done: self._summed(done)[1] < limit))[1]
        done = ends(schedule, count, times, traffic, lambda done: np.zeros(done.shape[1], bool))  # nothing waits
        if (some := np.nonzero(self._summed(done)[1] < limit)[0]).size:
            done[:, some] = blocking.ends(count, times.take(some))
        return self._summed(done)[1]

    def parts(self) -> Parts:
        done = self._done()
        last = done.max(axis=0)
        all_summed, total = self._summed(done)
        return Parts(
            total=total,
            pipeline=last,
            sums=all_summed - last,
            embedding=total - all_summed,
            optimizer=self.times.start.max(axis=0),
        )

    def longest(self, known: Floats | None = None) -> Longest:
        """The longest chain of waits of the iteration, which takes so many seconds if that is `known`."""
        after = self.exposed.copy()
        after[0] += self.embedding
        after[-1] += self.embedding if len(after) > 1 else 0
        if self.blocking:
            return blocking.longest(self.micro_batches, self.times, after)
        return longest(self.schedule, self.micro_batches, self.times, after, self.traffic, known)

    def _done(self) -> Floats:
        """[stages, pipelines]: when the schedule is over."""
        if self.blocking:
            return blocking.ends(self.micro_batches, self.times)
        return ends(self.schedule, self.micro_batches, self.times, self.traffic)

    def _summed(self, done: Floats) -> tuple[Floats, Floats]:
        """[pipelines]: when all stages have summed their gradients, if their schedules are over at `done`; and when the
        embedding's are summed, too."""
        own = done + self.exposed
        all_summed = own.max(axis=0)
        return all_summed, np.maximum(all_summed, np.maximum(own[0], own[-1]) + self.embedding)
