"""Which nodes a training had better go on with: a forecast of its batch, and the choice among sets of nodes by it.

Pure functions for whoever asks at the end of an epoch, in a run or a simulation: `forecast` continues the batches
that there were, `choose` adds up what they would take on each set of nodes, and says which one to use.
"""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from megatron_ext.contract.keys import Word

GAIN = 0.02
"""Part of the time or the dollars: a change that gains less, its restart counted, is not made."""
PARTS = 8
"""Stretches of a forecast, in each of which the batch is taken to be constant."""
HOUR = 3600.0


class By(Word):
    """What is to be least of the next epoch (megatron_ext/contract/adaptive/forecast.py)."""

    time = "time"
    dollars = "dollars"


TIME, DOLLARS = GOALS = tuple(By)


class Stretch(NamedTuple):
    """Iterations with about the same batch; numbers are of samples."""

    samples: float
    batch: float


class Candidate(NamedTuple):
    """A set of nodes that a training can go on with."""

    seconds: Callable[[float], float]
    """How long an iteration takes with a global batch of so many samples; infinite where these nodes cannot take it."""
    price_per_hour: Optional[float]
    """US dollars, of all its nodes; None: not known."""


class Choice(NamedTuple):
    """The candidate that was chosen."""

    number: int
    """Its place among the candidates."""
    seconds: float
    """That the forecast takes on it, with the restart if there is one."""
    dollars: Optional[float]
    reason: str
    """In words."""


def forecast(
    history: Sequence[Tuple[float, float]], span: float, lower: float, upper: float, parts: int = PARTS
) -> List[Stretch]:
    """The batch of the next `span` samples, in as many stretches of equal length.

    The batch goes on from the last one and grows or shrinks at the rate at which it did: that of the least-squares
    line through the logarithm of the batches, in which a point counts half as much for each `span` that it lies
    further back.

    Args:
        history: consumed samples and the global batch from there on, upwards; one point at least.
        span: samples to look ahead, such as those of an epoch.
        lower: the smallest batch that there may be, in samples.
        upper: the largest one.
        parts: stretches.
    """
    batch, growth, each = history[-1][1], _growth(history, span), span / parts
    ahead = []
    for part in range(parts):
        exponent = growth * (part + 0.5) * each
        found = batch * math.exp(max(-50.0, min(50.0, exponent)))  # beyond is out of all bounds
        ahead.append(Stretch(each, min(max(found, lower), upper)))
    return ahead


def _growth(history: Sequence[Tuple[float, float]], span: float) -> float:
    """Returns the growth of the batch's logarithm with each sample; 0 where only one point or moment is known."""
    last = history[-1][0]
    points = [(at - last, math.log(batch), math.pow(0.5, (last - at) / span)) for at, batch in history]
    whole = sum(weight for _, _, weight in points)
    x_mean = sum(weight * x for x, _, weight in points) / whole
    y_mean = sum(weight * y for _, y, weight in points) / whole
    spread = sum(weight * (x - x_mean) ** 2 for x, _, weight in points)
    if spread <= 0.0:
        return 0.0
    return sum(weight * (x - x_mean) * (y - y_mean) for x, y, weight in points) / spread


def seconds_of(candidate: Candidate, ahead: Sequence[Stretch]) -> float:
    """Returns what a candidate takes for what is ahead; infinite if there is a batch that it cannot take."""
    return sum(part.samples / part.batch * candidate.seconds(part.batch) for part in ahead)


def choose(
    candidates: Sequence[Candidate], now: int, ahead: Sequence[Stretch], restart_s: float, goal: str = TIME
) -> Choice:
    """The candidate to go on with: the one that takes least for what is ahead, or the present one unless another gains
    `GAIN` with its restart counted.

    Args:
        candidates: all that there are, the present one among them.
        now: the place of the present one. If it cannot take what is ahead, for a node is lost for example (`seconds`
            is infinite), whichever takes least is chosen.
        ahead: a `forecast`.
        restart_s: seconds in which nothing is trained while nodes change; they are paid for at the new one's price.
        goal: one of `GOALS`; with `DOLLARS` a candidate whose price is not known is not chosen.

    Raises:
        ValueError: none can take what is ahead.
    """
    found = []
    for number, candidate in enumerate(candidates):
        seconds = seconds_of(candidate, ahead) + (0.0 if number == now else restart_s)
        price = candidate.price_per_hour
        dollars = None if price is None else seconds / HOUR * price
        found.append((seconds, math.inf if dollars is None else dollars, number))
    costs = [one[GOALS.index(goal)] for one in found]
    # Of equal ones the present one, then the one that is better by the other measure.
    best = min(range(len(found)), key=lambda number: (costs[number], number != now, found[number]))
    if math.isinf(costs[best]):
        raise ValueError("no set of nodes can take the batches ahead" + (", or has a price" if goal == DOLLARS else ""))
    gain = 1.0 - costs[best] / costs[now]
    if best != now and gain < GAIN:
        reason = f"no other nodes gain {GAIN:.0%} after the restart that they need (the best {gain:+.1%})"
        best = now
    elif best == now:
        reason = f"these nodes take the {'fewest' if goal == DOLLARS else 'least'} {goal}"
    elif math.isinf(costs[now]):
        reason = "the current nodes cannot take the batches ahead"
    else:
        reason = f"{gain:.1%} {'fewer' if goal == DOLLARS else 'less'} {goal} expected, the restart counted"
    seconds, dollars, _ = found[best]
    return Choice(best, seconds, None if math.isinf(dollars) else dollars, reason)
