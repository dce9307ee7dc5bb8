"""Where the public optimizer may cut a graph: sets of operators that are closed under inputs, as its antichains name
them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fasop.bits import bits
from fasop.costs.arrays import Floats
from fasop.errors import SearchError
from fasop.graphs.graph import Operators

MOST = 6000
"""States that the public optimizer's recurrence is evaluated for."""


class States:
    """The states in their order: every one after those that it contains.

    Like the public ones they all contain the first operator without inputs, and what has no result that leads to
    the others is in none of them.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        named = (operators.number.get(node.name) for node in operators.graph.nodes)
        self.first = next(one for one in named if one is not None and not operators.takes[one])
        """The operator that all states contain."""
        antichains = _reachable(operators, self.first)
        self.masks = _topological(antichains)
        self.count = len(self.masks)
        size = -(-operators.count // 64) * 8
        packed = np.frombuffer(b"".join(m.to_bytes(size, "little") for m in self.masks), np.uint8)
        self._words = packed.view("<u8").reshape(self.count, -1)
        bytes_of = packed.reshape(self.count, -1)
        members = np.unpackbits(bytes_of, axis=1, count=operators.count, bitorder="little").astype(float)
        self.compute_s: Floats = members @ operators.compute_s
        self.activations: Floats = members @ operators.activations
        self.parameters: Floats = members @ operators.parameters
        sizes = operators.activations
        self.sent: Floats = np.array([sum(sizes[one] for one in antichains[m][0]) for m in self.masks])
        """Bytes that are counted as leaving a state: of its last operators, and of those with two uses within."""

    def within(self, state: int) -> NDArray[np.intp]:
        """The states that a state contains, without itself."""
        return np.flatnonzero(~(self._words[:state] & ~self._words[state]).any(axis=1))

    def stages(self, ends: list[int]) -> list[int | None]:
        """Return, for each operator, the number of the first of some states that contains it."""
        found: list[int | None] = [None] * self._operators.count
        for stage, end in enumerate(ends):
            for one in bits(self.masks[end]):
                found[one] = stage if found[one] is None else found[one]
        return found


def _reachable(operators: Operators, first: int) -> dict[int, tuple[list[int], list[int]]]:
    """Map each state to its augmented antichain and the states that follow.

    An antichain is augmented by what it depends on and is used elsewhere, too. The next states add an operator that
    uses a result of one of these, with all that this operator depends on.
    """
    twice = [
        [p for p in bits(below) if operators.users[p] & ~(below | 1 << number)]
        for number, below in enumerate(operators.below)
    ]
    begin = 1 << first
    found: dict[int, tuple[list[int], list[int]]] = {}
    antichains = {begin: [first]}
    queue = [begin]
    for state in queue:
        antichain = antichains[state]
        more = sorted({p for one in antichain for p in twice[one]})
        augmented = [*more, *antichain]
        covered = sum(1 << one for one in augmented)
        following = []
        for one in augmented:
            for new in bits(operators.users[one]):
                if new in antichain or operators.above[new] & covered:
                    continue
                reached = state | operators.below[new] | 1 << new
                following.append(reached)
                if reached not in antichains:
                    queue.append(reached)
                    after = [new if other == one else other for other in augmented]
                    both = sum({1 << other for other in after})
                    antichains[reached] = [*dict.fromkeys(o for o in after if not operators.above[o] & both)]
        found[state] = (augmented, following)
        if len(antichains) > MOST:
            raise SearchError(
                f"reference=true: the graph has more than {MOST} antichains, for which the public optimizer's tables "
                "take hours; leave reference=true out, and tdpp searches them with bounds"
            )
    return found


def _topological(following: dict[int, tuple[list[int], list[int]]]) -> list[int]:
    """Depth first, as the public tool sorts: of states that do not contain each other, the order is in its answers."""
    order: list[int] = []
    marked = set()
    for start in following:
        todo = [(start, False)]
        while todo:
            state, left = todo.pop()
            if left:
                order.append(state)
            elif state not in marked:
                marked.add(state)
                todo.append((state, True))
                todo += [(other, False) for other in reversed(following[state][1])]
    return order[::-1]
