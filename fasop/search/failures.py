"""What failures of nodes and saves make of an iteration, on average: days and dollars that a training really takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conf.schema.cluster import Cluster
from conf.schema.train import Train
from fasop.costs.arrays import Floats
from fasop.costs.hardware import NodeKind
from megatron_ext.contract.reliability import DAY_S, USUAL_DAYS, best_interval_s, expected_s
from megatron_ext.contract.train_config import AUTO


@dataclass(frozen=True, kw_only=True)
class Failures:
    save_s: float
    """What a save takes, and reading it."""
    restart_s: float
    every: int | None
    """Iterations between two saves; None: as a run chooses by itself."""

    @classmethod
    def of(cls, cluster: Cluster, train: Train, parameters: int) -> Failures | None:
        """None where no group says how often its nodes fail."""
        if all(group.failures_per_day is None for group in cluster.groups.values()):
            return None
        every = train.save_interval
        return cls(
            save_s=train.checkpoint_bytes(parameters) / (cluster.checkpoint_gb_per_s * 1e9),
            restart_s=cluster.restart_s,
            every=every if isinstance(every, int) else None,
        )

    def expected(self, nodes: Sequence[NodeKind], seconds: Floats) -> Floats:
        """[n], of iterations of so many `seconds` each on these nodes: what they take on average. It grows with
        `seconds`, and faster than they do."""
        mtbf_s = mtbf(nodes)
        if self.every is None:  # the same part of any iteration
            if math.isinf(mtbf_s):
                return seconds
            best = best_interval_s(self.save_s, mtbf_s)
            return seconds * (self._taken(best, mtbf_s) / best)
        taken = [self._taken(one, mtbf_s) for one in (self.every * seconds).tolist()]
        return np.array(taken) / self.every

    def _taken(self, work_s: float, mtbf_s: float) -> float:
        return expected_s(work_s, self.save_s, self.restart_s + self.save_s, mtbf_s)

    def said(self, nodes: Sequence[NodeKind], seconds: float) -> str:
        """In words, for iterations of so many `seconds` on these nodes."""
        mtbf_s = mtbf(nodes)
        means = "Days and amounts are what is to be expected with failures (cluster.groups.<group>.failures_per_day)"
        if math.isinf(mtbf_s):
            return f"{means}: of the first plan, no node fails."
        every_s = best_interval_s(self.save_s, mtbf_s) if self.every is None else self.every * seconds
        return (
            f"{means}: of the first plan, one of the nodes fails every {mtbf_s / 3600:.3g} hours, a save every "
            f"{every_s / 60:.3g} minutes (train.save_interval={self.every or AUTO}) takes {self.save_s:.3g} s, and a "
            f"start {self.restart_s:.3g} s and reading the checkpoint."
        )


def mtbf(nodes: Sequence[NodeKind]) -> float:
    """Returns the seconds between two failures of any of these nodes; infinite if none fails."""
    rates = (node.group.failures_per_day for node in nodes)
    a_day = sum(1 / USUAL_DAYS if rate is None else rate for rate in rates)
    return DAY_S / a_day if a_day else math.inf
