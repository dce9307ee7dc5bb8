"""What messages take on a cluster's links: latency plus bytes over bandwidth (Hockney 1994).

A link is shared by the ranks that use it at the same time. Times are seconds, sizes bytes. Everything is linear in the
size, so a collective is a link of its own: `all_reduce` of a link gives the latency and the seconds per byte that it
has for the size of the whole tensor. Numbers may be floats or arrays of them.

Where a pair's bandwidth depends on the size, a link is of one size of message: `transfer_s` says what its bytes take.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

from conf.schema.cluster import NodeGroup
from conf.schema.values.links import PairLink

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

Number = TypeVar("Number", float, "NDArray[float64]")


@dataclass(frozen=True, kw_only=True)
class Link(Generic[Number]):
    latency_s: Number
    s_per_byte: Number

    def takes(self, size: Number) -> Number:
        """Seconds for `size` bytes."""
        return self.latency_s + size * self.s_per_byte

    def all_reduce(self, ranks: int) -> Link[Number]:
        """Ring: 2 (n - 1) steps of an n-th of the bytes (Patarasuk and Yuan 2009); nothing for one rank."""
        return self._steps(2 * (ranks - 1), ranks)

    def reduce_scatter(self, ranks: int) -> Link[Number]:
        """Ring: n - 1 steps of an n-th of the bytes; `size` is that of the whole tensor."""
        return self._steps(ranks - 1, ranks)

    def all_gather(self, ranks: int) -> Link[Number]:
        """Return what the second half of an all-reduce takes; it takes as long as `reduce_scatter`."""
        return self._steps(ranks - 1, ranks)

    def _steps(self, steps: int, ranks: int) -> Link[Number]:
        return Link(latency_s=steps * self.latency_s, s_per_byte=steps / ranks * self.s_per_byte)


def within(group: NodeGroup) -> Link[float]:
    """Between two GPUs of a node, which have it for themselves."""
    return Link(latency_s=group.intra_latency_us * 1e-6, s_per_byte=8e-9 / group.intra_gbit_per_s)


def between(group: NodeGroup, sharing: float) -> Link[float]:
    """Out of a node of the group, while `sharing` of its ranks send at the same time."""
    return Link(latency_s=group.inter_latency_us * 1e-6, s_per_byte=8e-9 * sharing / group.inter_gbit_per_s)


def transfer_s(link: PairLink, size: float) -> float | None:
    """Seconds that `size` bytes of a message occupy a pair's link; None where the groups' own figures say.

    Up to the first point of `gbit_per_s_by_bytes` and from the last one on, bandwidth is that point's; between two
    points time grows linearly with the size, so that no larger message is quicker (piecewise linear as in SMPI: Clauss
    et al., IPDPS 2011).
    """
    if link.gbit_per_s is not None:
        return size * 8e-9 / link.gbit_per_s
    points = [(0, 0.0), *((most, most * 8e-9 / rate) for most, rate in link.gbit_per_s_by_bytes)]
    for (small, begin), (large, end) in pairwise(points):
        if size <= large:
            return begin + (size - small) / (large - small) * (end - begin)
    return size * 8e-9 / link.gbit_per_s_by_bytes[-1][1] if link.gbit_per_s_by_bytes else None
