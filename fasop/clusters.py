"""The clusters that are left when some nodes of a cluster are not used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from fasop.errors import SearchError
from fasop.hardware import NodeKind, gpus_of

MOST = 1000
"""Clusters that are tried; of a cluster with more, the numbers of a group's nodes go up in steps."""


def step(counts: Sequence[int]) -> int:
    """By how many nodes the clusters of so many nodes of each group differ: 1 if that does not make too many.

    Raises:
        SearchError: it does even with all or none of a group.
    """
    for by in range(1, max(counts) + 1):
        if math.prod(len(_numbers(count, by)) for count in counts) - 1 <= MOST:
            return by
    raise SearchError(
        f"cluster.groups has {len(counts)} groups, of which {2 ** len(counts) - 1} sets can be made, and at most "
        f"{MOST} are searched: put nodes that are alike into one group with their count, or leave groups out "
        "(~cluster.groups.<group>)"
    )


def clusters(kinds: Sequence[NodeKind]) -> list[Sequence[NodeKind]]:
    """Those with some nodes of some groups, the one of all nodes first, then by their number of GPUs."""
    by = step([kind.group.count for kind in kinds])
    chosen = itertools.product(*(_numbers(kind.group.count, by) for kind in kinds))
    found = [
        [_with(kind, count) for kind, count in zip(kinds, counts, strict=True) if count]
        for counts in chosen
        if any(counts)
    ]
    return sorted(found, key=gpus_of, reverse=True)


def tried(kinds: Sequence[NodeKind]) -> str:
    """In words, which clusters `clusters` gives."""
    by = step([kind.group.count for kind in kinds])
    return f"{len(clusters(kinds))} sets of nodes" + (f", whose numbers differ by {by}" if by > 1 else "")


def _numbers(count: int, by: int) -> list[int]:
    return [*range(0, count, by), count]


def _with(kind: NodeKind, count: int) -> NodeKind:
    return replace(kind, group=replace(kind.group, count=count))
