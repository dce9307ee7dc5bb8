"""The best division of a graph over the levels of a network: on contiguous ranks, or nested in the levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fasop.errors import SearchError
from fasop.graphs.division import Division, stages_of
from fasop.graphs.graph import Graph
from fasop.graphs.operators import Operators
from fasop.graphs.options import Level, Options, Sync
from fasop.graphs.own.held import Held
from fasop.graphs.own.machines import of_levels
from fasop.graphs.own.nested import fits, look, stages_with_memory
from fasop.graphs.own.recurrence import EQUAL, Best, fastest
from fasop.graphs.own.work import Work
from fasop.graphs.public.recurrence import data_parallel_s


def on_levels(graph: Graph, levels: Sequence[Level], options: Options, held: Held) -> Division:
    """The better one of contiguous and nested stages, for machines as the public optimizer knows them.

    Raises:
        SearchError: nothing fits.
    """
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
    return Division(
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
) -> Division:
    placed: list[int] = work.placed([piece.groups for piece in best.pieces])
    stages = [
        replace(stage, versions=piece.versions, memory_bytes=piece.memory_bytes, takes=piece.takes)
        for stage, piece in zip(
            stages_of(operators, placed, [(piece.replicas,) for piece in best.pieces]), best.pieces, strict=True
        )
    ]
    return Division(
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
