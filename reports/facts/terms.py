"""Where a stage's time of an iteration goes, measured and predicted, in the same terms so that they can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fasop.simulation import iteration
from megatron_ext.contract.plan import Plan
from reports.facts.breakdown import PARTS
from reports.facts.statistics import Statistics

TITLES = {
    "forward": "forward",
    "backward": "backward",
    "tensor": "tensor group",
    "messages": "p2p",
    "all_reduce": "all-reduce",
    "bubble": "bubble",
    "imbalance": "imbalance",
    "optimizer": "optimizer",
    "other": "other",
}
"""What pages call the terms."""
MEANING = (
    "Forward and backward: compute, without the communication inside; forward includes the loss. Tensor group: that "
    "communication. p2p: messages between stages, from the time they were sent. All-reduce: of gradients and their "
    "norm, and the all-gather of sharded weights, from the time the last rank of the group began. Bubble: waiting for "
    "other stages. Imbalance: waiting for a slower rank of the same stage. Optimizer: clipping and the update. Other: "
    "time without any of these events."
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Milliseconds, which together are an iteration; reports/facts/breakdown.py says what each is."""

    forward: float
    backward: float
    tensor: float
    messages: float
    all_reduce: float
    bubble: float
    imbalance: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def passes(self) -> float:
        """What a profile measures, which does not tell a tensor group's communication apart."""
        return self.compute + self.tensor

    @property
    def bubble_share(self) -> float:
        """Bubble / (passes + bubble), of a prediction: measured, a rank's passes also hold some of its imbalance."""
        return self.bubble / together if (together := self.passes + self.bubble) > 0 else 0.0

    @classmethod
    def of_prediction(cls, terms: iteration.Terms) -> Terms:
        """Those of a predicted stage, in which nothing is left over, and all ranks of a stage are alike."""
        return cls(
            forward=1e3 * terms.forward,
            backward=1e3 * terms.backward,
            tensor=0.0,
            messages=1e3 * terms.messages,
            all_reduce=1e3 * (terms.gradients + terms.embedding + terms.weights),
            bubble=1e3 * terms.bubble,
            imbalance=0.0,
            optimizer=1e3 * terms.optimizer,
            other=0.0,
        )


def measured(figures: Statistics, plan: Plan, iteration_ms: float) -> dict[int, Terms]:
    """By stage that has events: medians over its ranks and the steady iterations.

    Args:
        iteration_ms: how long an iteration takes; what no event of a rank fills of it is `other`.
    """
    found = {}
    for stage in range(plan.pipeline):
        ranks = ranks_seen(figures, plan, stage)
        if ranks and figures.steady.any():
            found[stage] = terms_of(figures, ranks, iteration_ms)
    return found


def terms_of(figures: Statistics, ranks: Sequence[int], iteration_ms: float) -> Terms:
    """Medians over these ranks and the steady iterations, of which there are some."""
    usual = {part: float(np.median(getattr(figures.spent, part)[ranks][:, figures.steady])) for part in PARTS}
    return Terms(**usual, other=iteration_ms - sum(usual.values()))


def ranks_seen(figures: Statistics, plan: Plan, stage: int) -> list[int]:
    """The ranks of a stage that have events."""
    return [rank.rank for rank in plan.ranks if rank.stage == stage and figures.events[rank.rank].any()]
