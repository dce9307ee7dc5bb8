"""What a run has cost so far, and what it will have cost at its end."""

from __future__ import annotations

from dataclasses import dataclass

from launch.judge.outlook import outlook
from launch.judge.state import State
from launch.observe.observation import Observation


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Dollars, by the price of all nodes of the plan."""

    dollars: float
    limit: float | None
    """`train.max_cost`."""
    at_end: float | None
    """As expected; None of a run that is over, or where no end is."""

    def __str__(self) -> str:
        text = f"${self.dollars:.2f} so far" if self.at_end is not None else f"${self.dollars:.2f}"
        text += "" if self.limit is None else f" of train.max_cost={self.limit:g}"
        if self.at_end is None:
            return text
        if self.limit is not None and self.at_end > self.limit:
            return f"{text}, which all iterations would exceed: about ${self.at_end:.2f}"
        return f"{text}, about ${self.at_end:.2f} at the end"


def costs(seen: Observation, state: State) -> Costs | None:
    """None where the price of a node is not known, or nothing has begun. A run without `train.max_cost` counts its
    newest start alone."""
    train = seen.plan.train
    if train.price_per_hour is None or seen.took_s is None or seen.plan.rehearsal is not None:
        return None
    a_second = train.price_per_hour / 3600
    dollars = seen.took_s * a_second if seen.spent is None else seen.spent
    left = outlook(seen, state).left_s
    return Costs(dollars=dollars, limit=train.max_cost, at_end=None if left is None else dollars + left * a_second)
