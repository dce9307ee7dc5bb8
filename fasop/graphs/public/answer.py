"""The division of a graph that the public optimizer chooses."""

from __future__ import annotations

from collections.abc import Sequence

from fasop.graphs.division import Division, stages_of
from fasop.graphs.graph import Graph
from fasop.graphs.operators import Operators
from fasop.graphs.options import Level, Options
from fasop.graphs.public.recurrence import optimize
from fasop.graphs.public.states import States


def divide(graph: Graph, levels: Sequence[Level], options: Options) -> Division:
    """As the public tool's `-o` writes it.

    Raises:
        SearchError: there is none, or too many states to look at.
    """
    operators = Operators(graph)
    states = States(operators)
    answer = optimize(states, levels, options)
    placed = states.stages(answer.ends)
    left = [node.name for node, stage in zip(operators.nodes, placed, strict=True) if stage is None]
    notes = []
    if left:
        notes.append(
            f"the public optimizer considers only what depends on {operators.nodes[states.first].name}: it gives "
            f"{', '.join(left[:3])}{', ...' * (len(left) > 3)} no stage and ignores their time"
        )
    return Division(
        stages=stages_of(operators, placed, [segment.replicas for segment in answer.segments]),
        graph=operators.annotated(placed),
        pipeline_s=answer.pipeline_s,
        data_parallel_s=answer.data_parallel_s,
        single_s=answer.single_s,
        notes=tuple(notes),
    )
