"""Layouts as arrays: many at once, and one by its replicas."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Integers
from megatron_ext.contract.layout import Layout


class LayoutBatch:
    """Layouts with as many GPUs, in arrays [layouts, stages]."""

    def __init__(self, tensors: Integers, replicas: Integers, exists: NDArray[np.bool_]) -> None:
        self.tensors, self.replicas, self.exists = tensors, replicas, exists
        widths = tensors * replicas * exists
        self.ends = np.cumsum(widths, axis=1)
        self.begins = self.ends - widths
        self.last = exists.sum(axis=1) - 1
        self.even: NDArray[np.bool_] = ((replicas == replicas[:, :1]) | ~exists).all(axis=1)
        """[layouts]: whether all stages have as many replicas."""

    @cached_property
    def ahead(self) -> Integers:
        """[layouts, stages]: micro-batches that this stage and all after it hold for one of its replicas, but one."""
        after = np.cumsum((self.exists * self.replicas)[:, ::-1], axis=1)[:, ::-1]
        return (after - 1) // self.replicas

    @cached_property
    def lag(self) -> Integers:
        """[layouts, stages]: micro-batches that weight gradients may come later."""
        behind = self.exists * self.replicas
        return (np.cumsum(behind, axis=1) - behind) // self.replicas

    @classmethod
    def of(cls, every: Sequence[Layout]) -> LayoutBatch:
        stages = np.array([layout.stages for layout in every], np.int64)
        exists = np.arange(stages.max(initial=1)) < stages[:, np.newaxis]
        tensors, replicas = np.ones(exists.shape, np.int64), np.ones(exists.shape, np.int64)
        tensors[exists] = [*chain.from_iterable(layout.tensors for layout in every)]
        replicas[exists] = [*chain.from_iterable(layout.replicas for layout in every)]
        return cls(tensors, replicas, exists)

    def take(self, rows: Integers) -> LayoutBatch:
        most = int(self.last[rows].max(initial=0)) + 1
        return LayoutBatch(self.tensors[rows, :most], self.replicas[rows, :most], self.exists[rows, :most])

    def inside_nodes(self, gpus: Sequence[int]) -> NDArray[np.bool_]:
        """[layouts]: whether every tensor group lies inside one of nodes of so many GPUs."""
        fine = np.ones(len(self.tensors), bool)
        for end in [*accumulate(gpus)][:-1]:
            inside = (self.begins < end) & (end < self.ends)
            fine &= ~(inside & ((end - self.begins) % self.tensors > 0)).any(axis=1)
        return fine


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
