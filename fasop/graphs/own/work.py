"""What is to be divided: operators with their costs on each kind of GPU, as few of them as give the same best plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasop.bits import bits, mask
from fasop.costs.arrays import Bools, Floats
from fasop.errors import SearchError
from fasop.graphs.graph import Operator
from fasop.graphs.operators import Operators, users_and_above


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
