"""Where a graph may be cut: sets of groups that hold all that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.graphs.own.work import Work


class TooMany(Exception):
    """More cuts than the work that is allowed."""


class Cuts:
    """Some of them, sorted by the work before them and then as numbers."""

    def __init__(self, work: Work, masks: Sequence[int]) -> None:
        size = -(-work.count // 64) * 8
        packed = np.frombuffer(b"".join(m.to_bytes(size, "little") for m in masks), np.uint8).reshape(len(masks), -1)
        members = np.unpackbits(packed, axis=1, count=work.count, bitorder="little").astype(float)
        compute = members @ work.compute_s
        order = np.array(sorted(range(len(masks)), key=lambda one: (compute[one, 0], masks[one])))
        self.masks = [masks[one] for one in order]
        members = members[order]
        self.words: NDArray[np.uint64] = packed[order].copy().view("<u8")
        self.compute_s: Floats = compute[order]
        """[cuts, kinds] of what lies before."""
        self.parameters: Floats = members @ work.parameters
        self.activations: Floats = members @ work.activations
        self.fixed: Floats = members @ work.fixed
        self.working: Floats = members @ work.works
        """Groups before that work."""
        givers = [giver for giver, _, _ in work.results]
        users = np.array([[taken >> bit & 1 for bit in range(work.count)] for _, taken, _ in work.results], float)
        leaving = members[:, givers] * ((1 - members) @ users.reshape(-1, work.count).T > 0)
        self.sent: Floats = leaving @ np.array([size for _, _, size in work.results])
        """Bytes of results from before that are used behind."""

    def some(self, which: NDArray[np.intp]) -> Cuts:
        """Only these, in their order."""
        found = copy(self)
        found.masks = [self.masks[one] for one in which]
        for name in ("words", "compute_s", "parameters", "activations", "fixed", "working", "sent"):
            setattr(found, name, getattr(self, name)[which])
        return found

    def __len__(self) -> int:
        return len(self.masks)


def in_one_order(work: Work) -> Cuts:
    """Those that one order of the groups has, without the two ends."""
    return Cuts(work, [(1 << number) - 1 for number in range(1, work.count)])


def between(work: Work, least: float, most: float, allowed: int) -> list[int]:
    """All cuts with so many seconds of work before them, on the first kind of GPU.

    Raises:
        TooMany: more than `allowed` steps are needed.
    """
    seconds = [float(one) for one in work.compute_s[:, 0]]
    whole, total = work.all, sum(seconds)
    found: list[int] = []
    todo = [(0, 0, 0.0, total)]  # held, left out, seconds held, most that they may become
    while todo:
        held, out, least_now, most_now = todo.pop()
        allowed -= 1
        if allowed < 0:
            raise TooMany
        free = whole & ~(held | out)
        if not free:
            found.append(held)
            continue
        one = (free & -free).bit_length() - 1
        more = work.above[one] & ~out | 1 << one
        left = most_now - sum_of(seconds, more)
        if left >= least:
            todo.append((held, out | more, least_now, left))
        if least_now + seconds[one] <= most:
            todo.append((held | 1 << one, out, least_now + seconds[one], most_now))
    return [held for held in found if held not in (0, whole)]


def sum_of(values: Sequence[float], chosen: int) -> float:
    """Add up the values whose bits are set."""
    total = 0.0
    while chosen:
        low = chosen & -chosen
        total += values[low.bit_length() - 1]
        chosen ^= low
    return total
