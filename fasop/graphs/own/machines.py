"""Ranks in a row, as stages take them, and what their links take: nodes of a cluster, or levels of a network.

A message between two ranks uses the links of the level on which they part: those of the ranks within a node, those of
the nodes between two nodes. A stage's mini-batch m is sent by replica m mod p and taken by replica m mod q, and its
gradient comes back, so a link is loaded with the part of the mini-batches that use it, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import gcd, prod

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.link_table import LinkTable
from fasop.costs.profiles.steps import Operation
from fasop.errors import SearchError
from fasop.graphs.division import Level

MOST = 128
"""The most ranks that a graph is divided over: the work grows with their cube."""
BUCKET = 2**24
"""Bytes of the messages that bandwidths are taken for, where they depend on the size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Machines:
    kinds: tuple[int, ...]
    """For each rank, which of the profiles has its times."""
    memory_bytes: Floats
    """Memory of each rank; infinite: it does not limit."""
    units: Integers
    """[levels, ranks]: the rank itself, its node, and so on."""
    s_per_byte: Floats
    """[ranks, ranks]: from a rank to another one."""
    latency_s: Floats
    """Likewise."""
    rounds: float
    """How often an all-reduce counts each byte on a link: 2 of a ring, 4 by the public optimizer's formula."""

    @property
    def count(self) -> int:
        return len(self.kinds)

    def first(self, count: int) -> Machines:
        """Only so many ranks."""
        return replace(
            self,
            kinds=self.kinds[:count],
            memory_bytes=self.memory_bytes[:count],
            units=self.units[:, :count],
            s_per_byte=self.s_per_byte[:count, :count],
            latency_s=self.latency_s[:count, :count],
        )

    @cache  # noqa: B019
    def summing(self, begin: int, ranks: int) -> tuple[float, float]:
        """Seconds, and seconds per byte, of adding up gradients round a ring of so many ranks."""
        if ranks == 1:
            return 0.0, 0.0
        here = np.arange(begin, begin + ranks)
        there = np.roll(here, -1)
        latency, rate = float(self.latency_s[here, there].max()), float(self.s_per_byte[here, there].max())
        return 2 * (ranks - 1) * latency, self.rounds * (ranks - 1) / ranks * rate

    @cache  # noqa: B019
    def sending(self, cut: int, before: int, behind: int) -> float:
        """Seconds per byte that crosses a cut between two stages, of so many ranks before it and behind it, in each
        mini-batch and back: of the link with the largest load."""
        common = gcd(before, behind)
        meet = np.subtract.outer(np.arange(before), np.arange(behind)) % common == 0
        here, there = slice(cut - before, cut), slice(cut, cut + behind)
        loads = meet * common / (before * behind) * self.s_per_byte[here, there]
        together = self.units[:, here, np.newaxis] == self.units[:, np.newaxis, there]
        parting = (~together).sum(axis=0) - 1
        most = 0.0
        for level in range(len(self.units)):
            used = np.where(parting == level, loads, 0.0)
            for units, load in (
                (self.units[level, here], used.sum(axis=1)),
                (self.units[level, there], used.sum(axis=0)),
            ):
                most = max(most, float(np.bincount(units - units.min(), load).max()))
        return 2 * most


def require_few(ranks: int, where: str, way_out: str) -> None:
    """Raises SearchError: a graph is not divided over so many ranks."""
    if ranks > MOST:
        raise SearchError(
            f"{where}: {ranks:,} machines are too many, a graph is divided over at most {MOST}; {way_out}"
        )


def of_levels(levels: Sequence[Level], memory_bytes: float | None) -> Machines:
    """Make machines as the public optimizer knows them; `levels` begin with the innermost one."""
    ranks = np.arange(prod(level.machines for level in levels))
    sizes = [1, *accumulate((level.machines for level in levels[:-1]), lambda a, b: a * b)]
    units = np.array([ranks // size for size in sizes])
    together = units[:, :, np.newaxis] == units[:, np.newaxis, :]
    parting = np.maximum((~together).sum(axis=0) - 1, 0)
    return Machines(
        kinds=(0,) * len(ranks),
        memory_bytes=np.full(len(ranks), np.inf if memory_bytes is None else memory_bytes),
        units=units,
        s_per_byte=np.array([1 / level.bytes_per_s for level in levels])[parting],
        latency_s=np.zeros((len(ranks), len(ranks))),
        rounds=4.0,
    )


def of_nodes(
    kinds: Sequence[NodeKind], order: Sequence[int], profiles: Sequence[int], memory: Sequence[float]
) -> Machines:
    """Make machines from a cluster's nodes in this order of kinds, which have these profiles and bytes of memory."""
    table = LinkTable.of(kinds, [1.0] * len(kinds), BUCKET, Exchange(Operation.all_reduce, 2, BUCKET))
    kind = np.array([one for one in order for _ in range(kinds[one].gpus)])
    node = np.array([number for number, one in enumerate(order) for _ in range(kinds[one].gpus)])
    here, there = kind[:, np.newaxis], kind[np.newaxis, :]
    stays = node[:, np.newaxis] == node[np.newaxis, :]
    outside = np.maximum(table.leaving[here, there], table.entering[here, there])
    return Machines(
        kinds=tuple(profiles[one] for one in kind),
        memory_bytes=np.array([memory[one] for one in kind]),
        units=np.array([np.arange(len(kind)), node]),
        s_per_byte=np.where(stays, table.inside.s_per_byte[kind][:, np.newaxis], outside),
        latency_s=np.where(stays, table.inside.latency_s[kind][:, np.newaxis], table.latency_s[here, there]),
        rounds=2.0,
    )
