"""Where a graph may be cut: sets of groups that hold all that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.graphs.own.work import Work

WIDE = 256
"""The groups of a graph whose steps take twice as long as those of the smallest."""
BLOCK = 2**22
"""The members of cuts that are counted at a time."""


class TooMany(Exception):
    """More cuts than the work that is allowed."""


class Allowance:
    """The steps that several listings of cuts may take together."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Raises TooMany: there are not so many left."""
        self.left -= steps
        if self.left < 0:
            raise TooMany


class Cuts:
    """Some of them, sorted by the work before them and then as numbers."""

    def __init__(self, work: Work, masks: Sequence[int]) -> None:
        size = -(-work.count // 64) * 8
        packed = np.frombuffer(b"".join(m.to_bytes(size, "little") for m in masks), np.uint8).reshape(len(masks), -1)
        kinds = work.compute_s.shape[1]
        columns = np.column_stack([work.compute_s, work.parameters, work.activations, work.fixed, work.works])
        totals, sent = np.empty((len(masks), columns.shape[1])), np.empty(len(masks))
        givers = [giver for giver, _, _ in work.results]
        sizes = np.array([size for _, _, size in work.results])
        starts, flat = work.result_users
        rows = max(1, BLOCK // max(work.count, flat.size))
        for first in range(0, len(masks), rows):
            some = slice(first, first + rows)
            members = np.unpackbits(packed[some], axis=1, count=work.count, bitorder="little")
            totals[some] = members @ columns
            missing = members[:, givers] > 1  # without results
            if flat.size:
                missing = np.logical_or.reduceat(members[:, flat] == 0, starts, axis=1)
            sent[some] = (members[:, givers] * missing) @ sizes
        order = np.array(sorted(range(len(masks)), key=lambda one: (totals[one, 0], masks[one])))
        self.masks = [masks[one] for one in order]
        self.words: NDArray[np.uint64] = packed[order].copy().view("<u8")
        self.compute_s: Floats = totals[order, :kinds]
        """[cuts, kinds] of what lies before."""
        self.parameters: Floats = totals[order, kinds]
        self.activations: Floats = totals[order, kinds + 1]
        self.fixed: Floats = totals[order, kinds + 2]
        self.working: Floats = totals[order, kinds + 3]
        """Groups before that work."""
        self.sent: Floats = sent[order]
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


def between(work: Work, least: float, most: float, allowed: Allowance) -> list[int]:
    """All cuts with so many seconds of work before them, on the first kind of GPU.

    Raises:
        TooMany: more steps are needed than are allowed.
    """
    seconds = [float(one) for one in work.compute_s[:, 0]]
    whole, total = work.all, sum(seconds)
    found: list[int] = []
    todo = [(0, 0, 0.0, total)]  # held, left out, seconds held, most that they may become
    while todo:
        held, out, least_now, most_now = todo.pop()
        allowed.spend(1 + work.count // WIDE)
        free = whole & ~(held | out)
        if not free:
            found.append(held)
            continue
        one = (free & -free).bit_length() - 1
        more = work.above[one] & ~out | 1 << one
        left = most_now - sum_of(work.compute_s[:, 0], more)
        if left >= least:
            todo.append((held, out | more, least_now, left))
        if least_now + seconds[one] <= most:
            todo.append((held | 1 << one, out, least_now + seconds[one], most_now))
    return [held for held in found if held not in (0, whole)]


def sum_of(values: Floats, chosen: int) -> float:
    """Add up the values whose bits are set."""
    packed = np.frombuffer(chosen.to_bytes(-(-len(values) // 8), "little"), np.uint8)
    return float(np.unpackbits(packed, count=len(values), bitorder="little") @ values)
