"""The embedding of a large vocabulary: what the first and the last stage have of it that no other stage has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_ext.contract.models.parameters import block_numel
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import Graph, Integers, Kind, median_by_rank
from reports.path.layers import by_stage, layer_ns
from reports.path.slow_ranks import ALIKE, computing, layers_of, scaled


def vocabulary(graphs: Sequence[Graph], plan: Plan) -> Iterator[Change]:
    """An embedding that weighs more than a layer, as evenly divided over the stages as layers are.

    Its head, which computes on the last stage alone, and its part of the update take each stage as long; its all-reduce
    takes as long as that of a layer.
    """
    model, layers = plan.model, layers_of(plan)
    if model.family not in ALIKE or plan.pipeline < 2 or not layers:
        return
    layer, word = block_numel(model, "layer", 1), model.padded_vocab_size * model.hidden
    if word <= layer:
        return
    stages = {place.rank: place.stage for place in plan.ranks}
    last = plan.pipeline - 1
    before = by_stage(stages, median_by_rank([computing(graph) for graph in graphs]))
    if last not in before:
        return
    each = layer_ns(plan, before, layers)[last]
    # Of a slow rank, the rest would not be the head's.
    head = min(max(before[last] - layers[last] * each, 0.0), each * word / layer)
    if not each or not head:
        return
    times = {
        stage: (ns + head / plan.pipeline - (head if stage == last else 0.0)) / max(ns, 1.0)
        for stage, ns in before.items()
    }
    because = (
        f"The embedding of {model.vocab_size:,} tokens weighs as much as {word / layer:,.1f} layers, and on stage "
        f"{last} its head computes as long as {head / each:,.1f} layers"
    )
    summed = [int(sums) for graph in graphs if (sums := _sums(graph, Kind.EMBEDDING).max())]
    because += f"; its all-reduce takes {np.median(summed) / 1e6:,.1f} ms per iteration." if summed else "."
    weights = {
        stage: (count * layer + word / plan.pipeline) / (count * layer + (word if stage in (0, last) else 0) or 1)
        for stage, count in enumerate(layers)
    }
    yield Change(
        cause=Cause.EMBEDDING,
        change="the embedding divided evenly over the stages",
        because=because,
        lasts_ns=[_divided(graph, stages, times, weights, layer / word) for graph in graphs],
    )


def _sums(graph: Graph, kind: Kind) -> Integers:
    return graph.by_rank(np.where(graph.kind == kind, graph.lasts_ns, 0))


def _divided(
    graph: Graph, stages: Mapping[int, int], times: Mapping[int, float], weights: Mapping[int, float], part: float
) -> Integers:
    """The lengths with these factors: by stage of passes and of updates, and that of the embedding's all-reduce."""
    lasts = scaled(graph, {rank: times.get(stages[rank], 1.0) for rank in graph.last})
    updates = np.ones(max(graph.last) + 1)
    for rank in graph.last:
        updates[rank] = weights[stages[rank]]
    lasts = np.where(graph.kind == Kind.OPTIMIZER, graph.scaled(Kind.OPTIMIZER, updates), lasts)
    return np.where(graph.kind == Kind.EMBEDDING, (graph.lasts_ns * part).astype(np.int64), lasts)
