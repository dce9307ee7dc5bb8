"""What is to be divided, as few operators as give the same best plan, and where it may be cut: sets of groups that hold
all that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from fasop.bits import bits, mask
from fasop.costs.arrays import Bools, Floats
from fasop.errors import SearchError
from fasop.graphs.graph import Operator, Operators, users_and_above


class Work:
    """Groups of operators that some best division keeps on one stage.

    - What costs nothing, sends nothing and takes nothing can lie anywhere before its users, and is left out.
    - What costs nothing and takes the result of one operator lies with it, where all its other users are so, too, and
      their results are together no larger: after them no cut sends more. Where memory limits, this holds for those that
      keep nothing, since it would be kept on that stage.

    Neither can leave a stage without work, which no division may have. Group i is bit i of a mask.
    """

    def __init__(self, operators: Operators, compute_s: Floats, *, limited: bool, in_order: bool = False) -> None:
        """`compute_s` [operators, kinds] by kind of GPU; whether memory limits, and whether stages must lie in the one
        order of the operators."""
        self._operators = operators
        works = (compute_s.max(axis=1) > 0) | (operators.parameters > 0)
        if not works.any():
            raise SearchError("no operator of the graph takes time or has parameters, so there is nothing to divide")
        group_of: dict[int, int] = {}
        groups: list[list[int]] = []
        for one in range(operators.count):
            taken = [other for other in bits(operators.takes[one]) if other in group_of]
            if not works[one] and not taken and not operators.activations[one] and not operators.held[one]:
                continue
            before = taken[0] if len(taken) == 1 else None
            if before is not None and self._follow(before, works, limited=limited):
                group_of[one] = group_of[before]
                groups[group_of[one]].append(one)
            else:
                group_of[one] = len(groups)
                groups.append([one])
        self.groups = groups
        self.count = len(groups)
        self.compute_s: Floats = np.array([compute_s[group].sum(axis=0) for group in groups])
        """[groups, kinds]"""
        self.parameters: Floats = np.array([operators.parameters[group].sum() for group in groups])
        self.activations: Floats = np.array([operators.held[group].sum() for group in groups])
        self.fixed: Floats = np.array([operators.fixed[group].sum() for group in groups])
        self.works = np.array([works[group].any() for group in groups])
        self.takes = [
            mask(group_of[other] for one in group for other in bits(operators.takes[one]) if other in group_of)
            & ~(1 << number)
            for number, group in enumerate(groups)
        ]
        self.results = [
            (number, users, float(operators.activations[one]))
            for number, group in enumerate(groups)
            for one in group
            if (users := mask(group_of[other] for other in bits(operators.users[one])) & ~(1 << number))
        ]
        """The group that gives it, the groups that take it, as a mask, and its bytes."""
        taking = [[*bits(users)] for _, users, _ in self.results]
        self.result_users = (
            np.cumsum([0, *map(len, taking)])[:-1],
            np.array([one for users in taking for one in users], np.intp),
        )
        """The groups that take each result, one result after another, behind the place where those of each begin."""
        if in_order:
            self.takes = [taken | 1 << number >> 1 for number, taken in enumerate(self.takes)]
        self.users, self.above = users_and_above(self.takes)

    def _follow(self, before: int, works: Bools, *, limited: bool) -> bool:
        """Whether all users of an operator lie with it."""
        operators = self._operators
        users = [*bits(operators.users[before])]
        alone = all(
            not works[one] and operators.takes[one] == 1 << before and not (limited and operators.held[one])
            for one in users
        )
        return alone and bool(operators.activations[users].sum() <= operators.activations[before])

    @property
    def nodes(self) -> Sequence[Operator]:
        """List the nodes of the operators, in their order."""
        return self._operators.nodes

    @property
    def all(self) -> int:
        return (1 << self.count) - 1

    def placed(self, stages: Sequence[int]) -> list[int]:
        """Return the stage of each operator, if `stages` are masks of groups; what was left out lies with its first
        user."""
        operators = self._operators
        found = [len(stages) - 1] * operators.count
        known = set()
        for stage, members in enumerate(stages):
            for group in bits(members):
                for one in self.groups[group]:
                    found[one] = stage
                    known.add(one)
        for one in reversed(range(operators.count)):
            if one not in known:
                found[one] = min((found[user] for user in bits(operators.users[one])), default=0)
        return found


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
    """All cuts with so many seconds of work before them, on the first kind of GPU. Raises TooMany: more steps are
    needed than are allowed."""
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
