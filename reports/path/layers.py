"""Layers moved from stage to stage: one, as many as help, and as the plan of a search has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fasop.search.findings.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.facts.dashed import dashed
from reports.path.change import Cause, Change
from reports.path.graph import Graph, Integers, median_by_rank
from reports.path.slow_ranks import ALIKE, computing, gpus, layers_of, scaled

MOST_LAYERS = 64
"""Moved one after another, at most."""


def moved_layers(graphs: Sequence[Graph], plan: Plan) -> Iterator[Change]:
    """Layers moved from the stage that computes longest to the one that is done first: one, and as many as help."""
    stages = {place.rank: place.stage for place in plan.ranks}
    layers, before = layers_of(plan), by_stage(stages, median_by_rank([computing(graph) for graph in graphs]))
    if len(before) < 2 or not layers:
        return
    each = layer_ns(plan, before, layers)
    longest, shortest = max(before, key=lambda stage: before[stage]), min(before, key=lambda stage: before[stage])
    because = (
        f"Stage {longest} computes the longest, {before[longest] / 1e6:,.1f} ms per iteration; stage {shortest} the "
        f"shortest, {before[shortest] / 1e6:,.1f} ms."
    )
    now, left, best = dict(before), list(layers), graphs[0].now_ns
    made = list[Change]()
    while len(made) < MOST_LAYERS:
        slow, quick = max(now, key=lambda s: now[s]), min(now, key=lambda s: now[s])
        if slow == quick or left[slow] < 1:
            break
        now[slow], now[quick] = max(now[slow] - each[slow], 0.0), now[quick] + each[quick]
        left[slow], left[quick] = left[slow] - 1, left[quick] + 1
        lasts = [_with_layers(graph, stages, before, now) for graph in graphs]
        period = graphs[0].period_ns(lasts[0])
        if period >= best:
            break
        best = period
        change = f"partition {dashed(left)}" if made else f"a layer moved from stage {slow} to stage {quick}"
        one = Change(
            cause=Cause.PARTITION,
            change=change,
            because=because,
            lasts_ns=lasts,
            keys={"parallel.partition": dashed(left)} if plan.chunks == 1 else {},
        )
        made.append(one)
    yield from made[:1]
    yield from made[1:][-1:]


def by_stage(stages: Mapping[int, int], computing: Mapping[int, float]) -> dict[int, float]:
    """What the ranks of each stage compute, as a median."""
    found: dict[int, list[float]] = {}
    for rank, stage in stages.items():
        if rank in computing:
            found.setdefault(stage, []).append(computing[rank])
    return {stage: float(np.median(own)) for stage, own in found.items()}


def _with_layers(
    graph: Graph, stages: Mapping[int, int], before: Mapping[int, float], now: Mapping[int, float]
) -> Integers:
    """The lengths where stages that usually compute `before` usually compute `now`."""
    here = by_stage(stages, computing(graph))
    factors = {stage: max(1 + (now[stage] - before[stage]) / ns, 0.0) for stage, ns in here.items() if ns > 0}
    return scaled(graph, {rank: factors.get(stages[rank], 1.0) for rank in graph.last})


def layers_by_stage(other: FoundPlan, plan: Plan) -> tuple[int, ...] | None:
    """Where they are all that differs, and each stage is one part: which parts of a stage get slower is not known."""
    layers = other.layers()
    return layers if layers and plan.chunks == 1 and len(layers) == len(layers_of(plan)) else None


def replayed_plans(graphs: Sequence[Graph], plan: Plan, every: Sequence[Sequence[int]]) -> Iterator[Change]:
    """Plans whose layers per stage, each of these, are all that differs."""
    if not every:
        return
    stages, layers_now = {place.rank: place.stage for place in plan.ranks}, layers_of(plan)
    before = by_stage(stages, median_by_rank([computing(graph) for graph in graphs]))
    each = layer_ns(plan, before, layers_now)
    for layers in every:
        now = {stage: max(ns + each[stage] * (layers[stage] - layers_now[stage]), 0.0) for stage, ns in before.items()}
        change = f"partition {dashed(layers)}, the best that tdpp search finds for these sizes"
        because = f"tdpp search finds a better balance than {dashed(layers_now)}."
        yield Change(
            cause=Cause.PARTITION,
            change=change,
            because=because,
            lasts_ns=[_with_layers(graph, stages, before, now) for graph in graphs],
            keys={"parallel.partition": dashed(layers)},
        )


def layer_ns(plan: Plan, computing: Mapping[int, float], layers: Sequence[int]) -> dict[int, float]:
    """What a layer takes on each stage: the mean of stages with the same GPUs, where layers are unlike each other.

    Where they are alike, the ends also compute an embedding or a head: where an inner stage has the same
    GPUs, its layers tell; else that stage with such GPUs where a layer and its share of the rest take least."""
    gpu = gpus(plan)
    of_stage = {place.stage: gpu[place.rank] for place in plan.ranks}
    if plan.model.family not in ALIKE:
        with_gpu = {stage: [other for other in computing if of_stage[other] == of_stage[stage]] for stage in computing}
        return {
            stage: sum(computing[other] for other in same) / max(sum(layers[other] for other in same), 1)
            for stage, same in with_gpu.items()
        }
    own = {stage: computing[stage] / layers[stage] for stage in computing if layers[stage]}
    inner = {stage: each for stage, each in own.items() if 0 < stage < plan.pipeline - 1}
    found = {}
    for stage in computing:
        alike = [each for other, each in inner.items() if of_stage[other] == of_stage[stage]]
        if stage in inner:
            found[stage] = inner[stage]
        elif alike:
            found[stage] = min(float(np.median(alike)), own.get(stage, np.inf))
        else:
            same = [each for other, each in own.items() if of_stage[other] == of_stage[stage]]
            found[stage] = min(same or own.values(), default=0.0)
    return found
