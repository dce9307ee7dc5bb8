"""Searches and bounds of single spaces, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.findings.no_plan import why_no_plan
from fasop.search.lower_bound import LowerBounds, Way
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices


def space(training: Training, kinds: Sequence[NodeKind], choices: Choices | None = None) -> Space:
    """All nodes of these kinds; without `choices` with every size, and the options of `training`.

    Raises:
        SearchError: nothing fits.
    """
    parallel = training.parallel
    choices = choices or Choices(
        schedule=(parallel.schedule,),
        chunks=(max(2, parallel.chunks),),
        recompute=(parallel.recompute,),
        sharded_optimizer=(parallel.sharded_optimizer,),
        sequence_parallel=(parallel.sequence_parallel,),
    )
    found = Space(training, kinds, choices)
    if not any(True for _ in found.groups):
        raise why_no_plan(training, kinds, choices)
    return found


def search(of: Space, most: int) -> Best:
    best = Best(most)
    explore([of], best)
    return best


def floor(training: Training, kinds: Sequence[NodeKind]) -> float:
    """Seconds below which no order of these nodes and no partition gets an iteration, proved."""
    parallel = training.parallel
    way = Way(parallel.schedule, parallel.chunks, parallel.recompute, parallel.sharded_optimizer)
    return float(LowerBounds(kinds).of([training], way, kinds)[0])
