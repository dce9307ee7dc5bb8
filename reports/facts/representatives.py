"""Which ranks are alike, so that a page of many ranks can begin with one replica and what differs from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.contract.plan_parts import Place
from reports.facts.statistics import SLOW_RANK, Statistics

PERCENTS = (round(100 * SLOW_RANK - 100), 10, 15, 20, 30, 40, 60, 80)
"""How far apart ranks may be that are still alike, the first that leaves few enough."""
MOST_SHOWN = 40
"""Ranks that a laptop's window shows as rows. A replica of more than half as many may bring as many more."""


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Which rank stands for which."""

    like: NDArray[np.int64]
    """(ranks,) the rank that each is like, or -1 where it stands for itself."""
    percent: int
    """Two ranks are alike within this in compute time, and within as many points in their bubble."""


def slowest_first(figures: Statistics, replica_of: Sequence[int]) -> list[int]:
    """The replicas, first the one with the rank that computes longest in an iteration. `replica_of`: the data-parallel
    index of each rank."""
    usual = _usual(figures, figures.spent.compute)
    longest = {replica: max(usual[np.array(replica_of) == replica]) for replica in sorted(set(replica_of))}
    return sorted(longest, key=lambda replica: -longest[replica])


def alike(figures: Statistics, ranks: Sequence[Place], replicas: Sequence[int]) -> Alike:
    """Lets as many ranks stand for others as differ by 5 %; where replicas differ in so many ways that these would not
    fit a window, by more. `replicas`: in the order in which they are to stand for others."""
    most = max(MOST_SHOWN, 2 * len({(one.stage, one.tp) for one in ranks}))
    for percent in PERCENTS:
        like = _like(figures, ranks, replicas, percent / 100)
        stand = Counter(one.dp for one in ranks if like[one.rank] < 0)
        # Once more with those first that stand for others in most stages, so that few pipelines are shown, but whole.
        first = sorted(replicas, key=lambda replica: (replica != replicas[0], -stand[replica]))
        like = _like(figures, ranks, first, percent / 100)
        if np.count_nonzero(like < 0) <= most:
            break
    return Alike(like=like, percent=percent)


def _like(figures: Statistics, ranks: Sequence[Place], replicas: Sequence[int], within: float) -> NDArray[np.int64]:
    """(ranks,) one of an earlier replica, of the same stage and place of the tensor group, that is like no other
    itself. Ranks without events are alike."""
    found = np.full(len(ranks), -1)
    compute, bubble = _usual(figures, figures.spent.compute), _usual(figures, np.nan_to_num(figures.bubble_share))
    order = {replica: at for at, replica in enumerate(replicas)}
    standing: dict[tuple[int, int], list[int]] = {}
    for one in sorted(ranks, key=lambda one: order[one.dp]):
        others = standing.setdefault((one.stage, one.tp), [])
        low, high = np.minimum(compute[one.rank], compute[others]), np.maximum(compute[one.rank], compute[others])
        near = (high <= (1 + within) * low) & (abs(bubble[one.rank] - bubble[others]) <= within)
        if near.any():
            found[one.rank] = others[int(near.argmax())]
        else:
            others.append(one.rank)
    return found


def _usual(figures: Statistics, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(ranks,) medians over steady iterations; without any, as in a run of one iteration, over all."""
    some = values[:, figures.steady] if figures.steady.any() else values
    return np.asarray(np.median(some, axis=1)) if some.shape[1] else np.zeros(len(some))
