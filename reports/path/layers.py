"""Layers moved from stage to stage: one, as many as help, and as the plan of a search has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fasop.search.findings.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import Graph
from reports.path.slow_ranks import computing, gpus, layers_of, scaled

MOST_LAYERS = 64
"""Moved one after another, at most."""


def moved_layers(graph: Graph, plan: Plan) -> Iterator[Change]:
    """Layers moved from the stage that computes longest to the one that is done first: one, and as many as help."""
    stages, own = {place.rank: place.stage for place in plan.ranks}, computing(graph)
    layers, before = layers_of(plan), _by_stage(stages, own)
    if len(before) < 2 or not layers:
        return
    each = _layer_ns(plan, before, layers)
    longest, shortest = max(before, key=lambda stage: before[stage]), min(before, key=lambda stage: before[stage])
    because = (
        f"Stage {longest} computes the longest, {before[longest] / 1e6:,.1f} ms per iteration; stage {shortest} the "
        f"shortest, {before[shortest] / 1e6:,.1f} ms."
    )
    now, left, best, moved = dict(before), list(layers), graph.period_ns(), 0
    change = None
    while moved < MOST_LAYERS:
        slow, quick = max(now, key=lambda s: now[s]), min(now, key=lambda s: now[s])
        if slow == quick or left[slow] < 1:
            break
        now[slow], now[quick] = max(now[slow] - each[slow], 0.0), now[quick] + each[quick]
        left[slow], left[quick], moved = left[slow] - 1, left[quick] + 1, moved + 1
        lasts = scaled(graph, _factors(stages, own, before, now))
        period = graph.period_ns(lasts)
        if period >= best:
            break
        best = period
        if moved == 1:
            yield Change(Cause.PARTITION, f"a layer moved from stage {slow} to stage {quick}", because, lasts)
        else:
            change = Change(Cause.PARTITION, f"partition {'-'.join(map(str, left))}", because, lasts)
    if change is not None:
        yield change


def _by_stage(stages: Mapping[int, int], computing: Mapping[int, int]) -> dict[int, float]:
    """What the ranks of each stage compute, as a median."""
    found: dict[int, list[int]] = {}
    for rank, stage in stages.items():
        if rank in computing:
            found.setdefault(stage, []).append(computing[rank])
    return {stage: float(np.median(own)) for stage, own in found.items()}


def _factors(
    stages: Mapping[int, int], computing: Mapping[int, int], before: Mapping[int, float], now: Mapping[int, float]
) -> dict[int, float]:
    """By rank, where its stage computed `before` and computes `now`."""
    return {rank: now[stages[rank]] / before[stages[rank]] for rank in computing if before[stages[rank]] > 0}


def layers_by_stage(other: FoundPlan, plan: Plan) -> tuple[int, ...] | None:
    """Where they are all that differs, and each stage is one part: which parts of a stage get slower is not known."""
    layers = other.layers()
    return layers if layers and plan.chunks == 1 and len(layers) == len(layers_of(plan)) else None


def replayed_plans(graph: Graph, plan: Plan, every: Sequence[Sequence[int]]) -> Iterator[Change]:
    """Plans whose layers per stage, each of these, are all that differs."""
    if not every:
        return
    stages, own, layers_now = {place.rank: place.stage for place in plan.ranks}, computing(graph), layers_of(plan)
    before = _by_stage(stages, own)
    each = _layer_ns(plan, before, layers_now)
    for layers in every:
        now = {stage: max(ns + each[stage] * (layers[stage] - layers_now[stage]), 0.0) for stage, ns in before.items()}
        change = f"partition {'-'.join(map(str, layers))}, the best that tdpp search finds for these sizes"
        because = f"tdpp search finds a better balance than {'-'.join(map(str, layers_now))}."
        yield Change(Cause.PARTITION, change, because, scaled(graph, _factors(stages, own, before, now)))


def _layer_ns(plan: Plan, computing: Mapping[int, float], layers: Sequence[int]) -> dict[int, float]:
    """What a layer takes on each stage. The ends also compute an embedding or a head: where an inner stage has the same
    GPUs, its layers tell; else that stage with such GPUs where a layer and its share of the rest take least."""
    gpu = gpus(plan)
    of_stage = {place.stage: gpu[place.rank] for place in plan.ranks}
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
