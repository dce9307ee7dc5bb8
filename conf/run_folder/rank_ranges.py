"""Many ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def rank_ranges(ranks: Iterable[int]) -> str:
    """In ascending order, neighbours together: `0, 2-5, 7`."""
    numbered = enumerate(sorted(set(ranks)))
    runs = ([rank for _, rank in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
