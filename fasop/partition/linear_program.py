"""Least of the largest of linear functions of some amounts: a dual simplex that takes constraints as they come.

Minimise T, where amounts x have bounds and a given sum, and T >= c_i + a_i x for every cut i. A basis is a set of
constraints that hold with equality. Every basis on the way is dual feasible, so that it gives a lower bound of T even
if a solution is broken off. Far smaller and simpler than a solver for any linear program, and it starts from where a
similar problem ended.

Where layers of several chunks may go, many bases have the same T, and steps among them need not end. So each amount has
a price of its own beside T, which is so low that what all amounts cost can be taken off T again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fasop.costs.arrays import Floats, Integers

TOLERANCE = 1e-9
"""How much a row may be broken."""
PIVOT = 1e-6
"""What a row must change by, for each unit of another one's slack, to take its place."""
IMPOSSIBLE = 1e-4
"""A row that is broken by more, and by all that may still change, has no solution."""
PRICE = 1e-8
"""The highest price of an amount: all amounts together cost far less than partitions that count as equal differ by."""
TIE = 1e-12
"""Prices by which rows are chosen are equal if they differ by no more."""
FRESH = 20
"""Steps after which rounding errors are cleared away."""
MOST_STEPS = 2000
"""After which a solution is broken off. (Some 600 were enough.)"""
CLEAR = 0.01
"""An amount is made whole that is farther than this from a whole number."""
SAFE = 1e-9
"""How much such rows are loosened for each layer, so that rounding excludes nothing."""


@dataclass(frozen=True, kw_only=True)
class BoxNode:
    """A box of amounts, and the basis reached in it."""

    low: Integers
    """[amounts + sums]: like `high`, of the amounts and of their sums that have bounds."""
    high: Integers
    active: Integers
    """[amounts]: the rows that hold with equality."""
    inverse: Floats
    """[amounts + 1, amounts + 1]: of the active rows and the row of the sum; gives the amounts and T."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    node: BoxNode
    amounts: Floats
    least: float
    """T, or a lower bound of it; infinite where no amounts are possible."""


class MinimaxLP:
    """The problem of one box after another. Cuts and limits may be added at any time, and hold in all of them.

    A row g with its limit h means g (x, T) >= h: first the lower bounds of the amounts and of `sums` of these, [sums,
    amounts], then the upper ones.
    """

    def __init__(self, total: int, amounts: int, sums: Integers | None = None) -> None:
        self._total, self._amounts = float(total), amounts
        self._prices = _prices(amounts)
        self.bounded = np.eye(amounts) if sums is None else np.concatenate([np.eye(amounts), sums])
        """[amounts + sums, amounts]: what a box bounds."""
        box = np.pad(self.bounded, ((0, 0), (0, 1)))
        self._rows = np.concatenate([box, -box])
        self._least = np.zeros(0)
        self._whole = np.full(len(self._rows), True)
        """Whether whole amounts leave a row a whole slack."""
        self._cuts = np.full(len(self._rows), False)
        """Whether a row is a cut."""

    def cut(self, slopes: Floats, constants: Floats) -> None:
        """T >= constants + slopes x, with [cuts, amounts]."""
        self._add(np.concatenate([-slopes, np.ones((len(slopes), 1))], axis=1), constants, whole=False)
        self._cuts[-len(slopes) :] = True

    def limit(self, weights: Integers | Floats, most: Integers | Floats, *, whole: bool) -> None:
        """weights x <= most, with [limits, amounts]; `whole` if all of these are whole numbers."""
        self._add(np.concatenate([-weights, np.zeros((len(weights), 1))], axis=1), -most.astype(float), whole=whole)

    def exclude(self, solved: Solved) -> int:
        """Adds what whole amounts satisfy and this solution, of the box of all, does not; returns how many rows.

        Gomory's mixed-integer cuts: an amount and the slacks of the active rows are in a linear relation, in which
        whole numbers cannot have the fraction that the solution has.
        """
        node, last = solved.node, self._amounts
        fractions = solved.amounts % 1
        clear = np.nonzero(np.minimum(fractions, 1 - fractions) > CLEAR)[0]
        fraction = fractions[clear, np.newaxis]
        share = -node.inverse[clear, :last]
        rest = share % 1
        weights = np.where(
            self._whole[node.active],
            np.where(rest <= fraction, rest / fraction, (1 - rest) / (1 - fraction)),
            np.where(share >= 0, share / fraction, -share / (1 - fraction)),
        )
        limits = np.concatenate([node.low, -node.high, self._least])
        rows, least = weights @ self._rows[node.active], weights @ limits[node.active] + 1
        scale = np.abs(rows).max(axis=1)
        self._add(rows / scale[:, np.newaxis], least / scale - SAFE * self._total, whole=False)
        return len(rows)

    def _add(self, rows: Floats, least: Floats, *, whole: bool) -> None:
        self._rows = np.concatenate([self._rows, rows])
        self._least = np.concatenate([self._least, least])
        self._whole = np.concatenate([self._whole, np.full(len(rows), whole)])
        self._cuts = np.append(self._cuts, np.full(len(rows), False))

    def root(self, low: Integers, high: Integers) -> BoxNode:
        """A basis of the box: the cut that was added last, and the lower bounds of all amounts but its cheapest one."""
        slopes = self._prices[:-1] - self._rows[-1, :-1]
        active = np.arange(self._amounts)
        active[np.argmin(slopes)] = len(self._rows) - 1
        return BoxNode(low=low, high=high, active=active, inverse=self._inverse(active))

    def widened(self, node: BoxNode, slopes: Floats) -> BoxNode:
        """A basis with one more amount, from 0 to 1, of which T has these slopes, [cuts]: at that of its bounds from
        which T only grows. `node` is of the problem without it."""
        column = np.zeros(len(self._rows))
        column[self._cuts] = -slopes
        self._rows = np.insert(self._rows, self._amounts, column, axis=1)
        self._amounts += 1
        self._prices = _prices(self._amounts)
        bound = np.eye(1, self._amounts + 1, self._amounts - 1)
        self._add(np.concatenate([bound, -bound]), np.array([0.0, -1.0]), whole=True)
        active = np.append(node.active, len(self._rows) - 2)
        inverse = self._inverse(active)
        if self._prices @ inverse[:, self._amounts - 1] < 0:
            active[-1] += 1
            inverse = self._inverse(active)
        return replace(node, active=active, inverse=inverse)

    def weights(self, node: BoxNode) -> Floats:
        """[cuts]: the mean of them that bounds T from below in this basis."""
        of_rows = np.zeros(len(self._rows))
        of_rows[node.active] = np.maximum(0.0, node.inverse[-1, :-1])
        weights = of_rows[self._cuts]
        return np.asarray(weights / weights.sum())

    def solve(self, node: BoxNode, most: int = MOST_STEPS) -> Solved:
        """From the basis of `node`, whose box may have been changed since; broken off after so many steps."""
        rows, last = self._rows, self._amounts
        limits = np.concatenate([node.low, -node.high, self._least])
        active, inverse = node.active.copy(), node.inverse.copy()
        for step in range(1, most):
            values = inverse @ np.append(limits[active], self._total)
            slack = rows @ values - limits
            worst = int(np.argmin(slack))
            if slack[worst] >= -TOLERANCE:
                break
            across = rows[worst] @ inverse
            possible = across[:last] > PIVOT
            gains = (self._prices @ inverse)[:last]
            ratios = np.where(possible, gains, np.inf) / np.where(possible, across[:last], 1.0)
            if not possible.any():
                if slack[worst] < -IMPOSSIBLE:
                    return Solved(node=node, amounts=values[:last], least=np.inf)
                break
            place = int(np.argmax(np.where(ratios <= ratios.min() + TIE, across[:last], 0.0)))
            active[place] = worst
            if step % FRESH == 0:
                inverse = self._inverse(active)
            else:
                column = inverse[:, place] / across[place]
                inverse -= np.outer(column, across)
                inverse[:, place] = column
        inverse = self._inverse(active)
        values = inverse @ np.append(limits[active], self._total)
        least = float(self._prices @ values) - PRICE * self._total
        if inverse[last, :last].min() >= -TIE:  # the basis is dual feasible without prices, too
            least = float(values[last])
        return Solved(node=replace(node, active=active, inverse=inverse), amounts=values[:last], least=least)

    def _inverse(self, active: Integers) -> Floats:
        """Gives amounts and T of what the active rows are; its last row is what T gains with each of them."""
        square = np.concatenate([self._rows[active], np.pad(np.ones((1, self._amounts)), ((0, 0), (0, 1)))])
        return np.linalg.inv(square)


def _prices(amounts: int) -> Floats:
    """[amounts + 1]: all differ, by no rule; that of T is 1."""
    return np.append(PRICE * (np.arange(1, amounts + 1) * math.sqrt(2) % 1), 1.0)
