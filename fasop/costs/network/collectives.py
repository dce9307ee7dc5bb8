"""What measured collectives take: times interpolated over sizes and numbers of ranks, given as links.

Between two measured sizes the logarithm of the time is a monotone cubic in the logarithm of the size (Fritsch and
Carlson 1980, slopes as Brodlie's); below the smallest size times stay, above the largest one they grow in proportion.
Beyond the measured numbers of ranks each step of the ring takes as long as with the nearest one; between two of them,
where each says so what the time would be, the logarithm of the time goes over from one to the other, linear in that of
the number. So a ring is met exactly, and others follow what was measured at both ends.

All else is linear in the bytes (`fasop.costs.network.links`), so a measured collective is given as the link whose ring
takes exactly as long for the size that a plan sends, and grows with the size as the measured times do there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from fasop.costs.network.links import Link
from fasop.costs.profiles.steps import CollectiveTimes, Operation


class Exchange(NamedTuple):
    """What ranks do together in a plan."""

    operation: Operation
    ranks: int
    bytes: float
    """Counted as `CollectiveTimes` does."""
    stride: int = 1
    """How many ranks further on the next one of the group lies."""

    def on_node(self, gpus: int) -> int:
        """Ranks of the group on each node of so many GPUs."""
        return max(1, min(self.ranks, gpus // self.stride))

    @property
    def steps(self) -> tuple[int, float]:
        """Messages of a ring one after another, and the part of `bytes` that each has."""
        if self.operation is Operation.send_recv:
            return 1, 1.0
        return (self.ranks - 1) * (2 if self.operation is Operation.all_reduce else 1), 1 / self.ranks


class At(NamedTuple):
    """A time, and how it grows with the size there: with 1 in proportion, with 0 not at all."""

    log_s: float
    growth: float


class Curve:
    """Times of one measurement by size, which never fall."""

    def __init__(self, us_by_bytes: Mapping[int, float]) -> None:
        sizes = sorted(us_by_bytes)
        self._x = [math.log(size) for size in sizes]
        self._y = [math.log(us * 1e-6) for us in accumulate((us_by_bytes[size] for size in sizes), max)]
        self._slopes = _monotone_slopes(self._x, self._y)

    def at(self, size: float) -> At:
        x = math.log(max(size, 1.0))
        if x <= self._x[0]:
            return At(self._y[0], 0.0)
        if x >= self._x[-1]:
            return At(self._y[-1] + x - self._x[-1], 1.0)
        right = bisect_right(self._x, x)
        left, width = right - 1, self._x[right] - self._x[right - 1]
        part, rise = (x - self._x[left]) / width, self._y[right] - self._y[left]
        begin, end = self._slopes[left] * width, self._slopes[right] * width
        # The cubic with these values and slopes at both ends, and its slope.
        bend, twist = 3 * rise - 2 * begin - end, begin + end - 2 * rise
        log_s = self._y[left] + part * (begin + part * (bend + part * twist))
        growth = (begin + part * (2 * bend + 3 * part * twist)) / width
        return At(log_s, min(1.0, max(0.0, growth)))


def _monotone_slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Returns a slope at each point with which the cubics between them rise wherever the points do."""
    widths = [b - a for a, b in pairwise(x)]
    rises = [(b - a) / width for (a, b), width in zip(pairwise(y), widths, strict=True)]
    inner = [
        0.0 if before * after == 0 else 3 * (w0 + w1) / ((2 * w1 + w0) / before + (w1 + 2 * w0) / after)
        for (before, after), (w0, w1) in zip(pairwise(rises), pairwise(widths), strict=True)
    ]
    return [rises[0], *inner, rises[-1]]


class Collectives:
    """All measured collectives of a profile."""

    def __init__(self, times: Iterable[CollectiveTimes]) -> None:
        self._known: dict[tuple[Operation, bool], dict[int, list[tuple[CollectiveTimes, Curve]]]] = {}
        for one in times:
            # Whatever number of ranks pass messages on at once, a message takes as long.
            ranks = 2 if one.operation is Operation.send_recv else one.ranks
            of_place = self._known.setdefault((one.operation, one.nodes > 1), {})
            of_place.setdefault(ranks, []).append((one, Curve(one.us_by_bytes)))

    def link(self, exchange: Exchange, *, gpus: int, between: bool, nics: int = 1) -> Link[float] | None:
        """The link whose ring takes as long as was measured, for one group that has all cards (`nics`) of its nodes,
        which have so many GPUs; None: not measured, or there is nobody to exchange anything with."""
        known = self._known.get((exchange.operation, between))
        if known is None or exchange.ranks < 2 or exchange.bytes <= 0:
            return None
        on_node = exchange.on_node(gpus)
        if between:  # a ring of all GPUs of its nodes has all their cards, one of a GPU on each node a single one
            every = [times for alike in known.values() for times, _ in alike]
            nearest = _on_each(min(every, key=lambda times: (_unlike(times, on_node), _on_each(times))))
            like = {number: [one for one in alike if _on_each(one[0]) == nearest] for number, alike in known.items()}
            known = {number: alike for number, alike in like.items() if alike}
        numbers = sorted(known)
        right = bisect_right(numbers, exchange.ranks)
        low, high = numbers[max(0, right - 1)], numbers[min(right, len(numbers) - 1)]
        if low >= exchange.ranks or low == high:
            return _link(exchange._replace(ranks=low), *_parts(known[low], exchange, on_node, nics))
        part = math.log(exchange.ranks / low) / math.log(high / low)
        (fixed, growing), (more_fixed, more_growing) = (
            _times(exchange, _link(exchange._replace(ranks=number), *_parts(known[number], exchange, on_node, nics)))
            for number in (low, high)
        )
        few, many = fixed + growing, more_fixed + more_growing
        growth = (1 - part) * growing / few + part * more_growing / many
        seconds = few ** (1 - part) * many**part
        return _link(exchange, (1 - growth) * seconds, growth * seconds)


def _on_each(times: CollectiveTimes) -> float:
    """A measurement's ranks on each node."""
    return times.ranks / times.nodes


def _unlike(times: CollectiveTimes, on_node: int) -> float:
    """How far these are from so many, as a ratio's logarithm."""
    return abs(math.log(_on_each(times) / on_node))


def _parts(
    alike: Sequence[tuple[CollectiveTimes, Curve]], exchange: Exchange, on_node: int, nics: int
) -> tuple[float, float]:
    """Seconds that a group with all cards of its nodes takes in any case, and that grow with the bytes, by the
    measurement that has nearly as many ranks on a node; its groups had the cards of their own GPUs, a message one."""
    times, curve = min(alike, key=lambda one: _unlike(one[0], on_node))
    log_s, growth = curve.at(exchange.bytes)
    used = 1 if times.operation is Operation.send_recv else _on_each(times)
    return (1 - growth) * math.exp(log_s), growth * math.exp(log_s) / max(times.sharing, nics / used)


def _link(exchange: Exchange, fixed: float, growing: float) -> Link[float]:
    """The link on which a ring of so many ranks takes these seconds."""
    steps, share = exchange.steps
    return Link(latency_s=fixed / steps, s_per_byte=growing / (steps * share * exchange.bytes))


def _times(exchange: Exchange, link: Link[float]) -> tuple[float, float]:
    """Seconds of a ring on this link that it takes in any case, and that grow with the bytes."""
    steps, share = exchange.steps
    return link.latency_s * steps, link.s_per_byte * steps * share * exchange.bytes
