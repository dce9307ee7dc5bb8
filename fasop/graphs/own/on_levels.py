"""The best division of a graph over the levels of a network: on contiguous ranks, or nested in the levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fasop.errors import SearchError
from fasop.graphs.division import Level, Options, Stage, StageDivision, Sync, stages_of
from fasop.graphs.graph import Graph, Operators
from fasop.graphs.own.cuts import Allowance, Cuts, TooMany, Work, between
from fasop.graphs.own.machines import of_levels
from fasop.graphs.own.recurrence import EQUAL, Best, fastest
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.graphs.public.recurrence import Answer, data_parallel_s, optimize
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
        """Raises TooMany: more than `MOST`."""
        self._work = work
        masks = [*between(work, -math.inf, math.inf, Allowance(STEPS)), work.all]
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
        """Return, for each operator, the number of the first of some states that contains it."""
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
    operators: Operators, states: States | CutStates, answer: Answer, held: VersionedMemory
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
    operators: Operators, states: States | CutStates, answer: Answer, held: VersionedMemory, memory_bytes: float | None
) -> bool:
    if memory_bytes is None:
        return True
    stages = stages_with_memory(operators, states, answer, held)
    return all((stage.memory_bytes or 0) <= memory_bytes for stage in stages)


def on_levels(graph: Graph, levels: Sequence[Level], options: Options, held: VersionedMemory) -> StageDivision:
    """The better one of contiguous and nested stages, for machines as the public optimizer knows them. Raises
    SearchError: nothing fits."""
    operators = Operators(graph)
    machines = of_levels(levels, options.memory_bytes)
    work = Work(operators, operators.compute_s[:, np.newaxis], limited=options.memory_bytes is not None)
    counts = range(machines.count, 0 if options.fewer else machines.count - 1, -1)
    best = fastest(work, machines, counts, options, held)
    nested, said = None, ""
    if len(levels) > 1:
        counted = replace(options, compression=options.compression or 1.0, memory_bytes=None)
        nested, said = look(operators, work, levels, counted)
        if nested is not None and not fits(operators, *nested, held, options.memory_bytes):
            nested, said = None, "the fastest nested layout does not fit the memory"
    if best is None and nested is None:
        raise nothing(options.straight, limited=options.memory_bytes is not None)
    everything = float(operators.compute_s.sum()), float(operators.parameters.sum())
    data_parallel = data_parallel_s(*everything, levels, options.sync)
    if best is not None and (nested is None or best.seconds <= nested[1].pipeline_s * (1 + EQUAL)):
        notes = [proved(best), *([said] if said else [])]
        if nested is not None:
            notes.append(f"stages nested in the levels take {nested[1].pipeline_s * 1e3:.3f} ms at best")
        return division(operators, work, best, data_parallel, notes, options.sync)
    assert nested is not None
    states, answer = nested
    contiguous = f"{best.seconds * 1e3:.3f} ms at best" if best is not None else "more memory than available"
    return StageDivision(
        stages=stages_with_memory(operators, states, answer, held),
        graph=operators.annotated(states.stages(answer.ends)),
        pipeline_s=answer.pipeline_s,
        data_parallel_s=data_parallel,
        single_s=answer.single_s,
        notes=(
            "nested stages: a replica count a x b is a machines of the outer level times b within each; on contiguous "
            f"ranks, which tdpp launch uses, stages take {contiguous}",
        ),
    )


def division(
    operators: Operators, work: Work, best: Best, data_parallel_s: float, notes: Sequence[str], sync: Sync
) -> StageDivision:
    placed: list[int] = work.placed([piece.groups for piece in best.pieces])
    stages = [
        replace(stage, versions=piece.versions, memory_bytes=piece.memory_bytes, takes=piece.takes)
        for stage, piece in zip(
            stages_of(operators, placed, [(piece.replicas,) for piece in best.pieces]), best.pieces, strict=True
        )
    ]
    return StageDivision(
        stages=tuple(stages),
        graph=operators.annotated([*placed]),
        pipeline_s=best.seconds,
        sync=sync,
        data_parallel_s=data_parallel_s,
        single_s=float(work.compute_s.sum(axis=0).min()),
        notes=tuple(notes),
    )


def proved(best: Best, where: str = "") -> str:
    """In words, what is known of all other divisions; `where` adds to which of them."""
    if best.seconds <= best.bound * (1 + EQUAL):
        return f"no division on contiguous ranks{where} is faster (proved)"
    return f"divisions on contiguous ranks{where} could be at most {best.seconds / best.bound - 1:.1%} faster"


def nothing(straight: bool, *, limited: bool) -> SearchError:
    if straight:
        return SearchError(
            "straight=true: no division gives each rank a stage with work"
            + (" and fits the memory" if limited else "")
            + "; leave straight=true out, or add fewer=true"
        )
    return SearchError(
        "no division fits the memory: give memory_gb= more, more ranks, or a profile of smaller mini-batches"
        if limited
        else "no division over all ranks; add fewer=true"
    )
