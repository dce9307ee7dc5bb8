"""Stages nested in the levels of a network, as the public optimizer lays them out, with our rule for memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fasop.errors import SearchError
from fasop.graphs.division import Stage, stages_of
from fasop.graphs.operators import Operators
from fasop.graphs.options import Level, Options
from fasop.graphs.own.cuts import Cuts, TooMany, between
from fasop.graphs.own.held import Held
from fasop.graphs.own.work import Work
from fasop.graphs.public.recurrence import Answer, optimize
from fasop.graphs.public.states import States

MOST = 600
"""Cuts that the recurrence is evaluated for."""
FEW = 300
"""States of the public optimizer."""
STEPS = 100_000
"""To list them."""


class CutStates:
    """All cuts between the groups of operators: more than the public states, of which each has the first operator."""

    def __init__(self, work: Work) -> None:
        """
        Raises:
            TooMany: more than `MOST`.
        """
        self._work = work
        masks = [*between(work, -math.inf, math.inf, STEPS), work.all]
        if len(masks) > MOST:
            raise TooMany
        cuts = Cuts(work, masks)
        self._masks, self._words = cuts.masks, cuts.words
        self.count = len(cuts)
        self.compute_s, self.parameters = cuts.compute_s[:, 0], cuts.parameters
        self.activations, self.sent = cuts.activations, cuts.sent

    def within(self, state: int) -> NDArray[np.intp]:
        """The states that a state contains, without itself."""
        return np.flatnonzero(~(self._words[:state] & ~self._words[state]).any(axis=1))

    def stages(self, ends: list[int]) -> list[int | None]:
        """By operator the number of the first of some states that contains it."""
        masks = [self._masks[end] for end in ends]
        return [*self._work.placed([mask & ~before for mask, before in zip(masks, [0, *masks], strict=False)])]


Found = tuple[States | CutStates, Answer]


def look(operators: Operators, work: Work, levels: Sequence[Level], options: Options) -> tuple[Found | None, str]:
    """The fastest nested stages whatever they hold; or None, and why.

    Where the public states are few they are looked at, too: they may have a stage that does nothing, whose machines are
    idle.
    """
    found: list[Found] = []
    why = "there are too many cuts"
    for make in (lambda: CutStates(work), lambda: _public(operators)):
        try:
            states = make()
            found.append((states, optimize(states, levels, options, strict=True)))
        except TooMany:
            continue
        except SearchError as error:
            why = str(error)
    if not found:
        return None, f"nested stages were not searched: {why}"
    return min(found, key=lambda one: one[1].pipeline_s), ""


def _public(operators: Operators) -> States:
    try:
        states = States(operators)
    except SearchError as error:
        raise TooMany from error
    if states.count > FEW or None in states.stages([states.count - 1]):
        raise TooMany
    return states


def stages_with_memory(
    operators: Operators, states: States | CutStates, answer: Answer, held: Held
) -> tuple[Stage, ...]:
    """With the memory of a pipeline of such stages."""
    stages = stages_of(operators, states.stages(answer.ends), [one.replicas for one in answer.segments])
    counts, ranks, received, found = [math.prod(stage.replicas) for stage in stages], 0, 0.0, []
    for number, (stage, count, end) in enumerate(zip(stages, counts, answer.ends, strict=True)):
        versions = (sum(counts) - 1 - ranks) // count + 1
        ends = {"first": number == 0, "last": number == len(stages) - 1}
        memory = held.of(stage.parameter_bytes, stage.activation_bytes, 0.0, received, versions, **ends)
        found.append(replace(stage, versions=versions, memory_bytes=memory))
        ranks, received = ranks + count, float(states.sent[end])
    return tuple(found)


def fits(
    operators: Operators, states: States | CutStates, answer: Answer, held: Held, memory_bytes: float | None
) -> bool:
    if memory_bytes is None:
        return True
    stages = stages_with_memory(operators, states, answer, held)
    return all((stage.memory_bytes or 0) <= memory_bytes for stage in stages)
