"""The replicas of a layout's stages as arrays, so that what all stages take is found at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Integers
from megatron_ext.contract.layout import Layout


class UnlikeReplicas(NamedTuple):
    """One of all replicas of a stage that take as long as each other: of most stages a single one is left."""

    ranks: Integers
    """[stages, replicas]: the first of each; where a stage has fewer, its first one again."""
    counts: Integers
    """[stages, replicas]: their micro-batches."""
    own: Integers
    """[stages]: how many replicas there are."""
    after: Integers
    """[stages]: micro-batches that the stage and all after it hold for one of its replicas, but one."""
    lag: Integers
    """[stages]: micro-batches that weight gradients may come later."""

    @classmethod
    def of(cls, layout: Layout, counts: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> UnlikeReplicas:
        """`counts` are the micro-batches of each replica by stage, `kinds` what ranks differ in, beside their stage."""
        unlike = list[list[tuple[int, int]]]()
        for stage, of_replicas in enumerate(counts):
            first = dict[tuple[Hashable, int], tuple[int, int]]()
            for replica, count in enumerate(of_replicas):
                rank = layout.rank(stage, replica, 0)
                first.setdefault((kinds[rank], count), (rank, count))
            unlike.append([*first.values()])
        most = max(map(len, unlike))
        table = np.array([some + some[:1] * (most - len(some)) for some in unlike])
        own, until = np.array(layout.replicas), np.array([*accumulate(layout.replicas)])
        after, before = until[-1] - until + own, until - own
        return cls(table[..., 0], table[..., 1], own, (after - 1) // own, before // own)
