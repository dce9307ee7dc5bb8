"""Layers moved from stage to stage: one, as many as help, and as the plan of a search has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from conf.schema.values.partition import dashed
from fasop.errors import SearchError
from fasop.search.findings.other_plans import FoundPlan
from fasop.simulation.ranks.replay import StageTimes, simulate
from megatron_ext.contract.models.counts import block_numel
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.iteration import as_json, schedule
from reports.facts.breakdown import BACKWARD, FORWARD, LOSS
from reports.path.change import Cause, Change, Gain
from reports.path.graph import EdgeKind, Graph, Integers, median_by_rank
from reports.path.slow_ranks import all_alike, gpus, layers_of
from reports.readers.events import Timeline

MOST_LAYERS = 64
"""Moved one after another, at most."""


def moved_layers(graphs: Sequence[Graph], plan: Plan) -> Iterator[Change]:
    """Layers moved from the stage that computes longest to the one that is done first: one, and as many as help."""
    stages, before = _computing(graphs, plan)
    layers = layers_of(plan)
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
        keys = {"parallel.partition": dashed(left)} if plan.chunks == 1 else {}
        made.append(Change(cause=Cause.PARTITION, change=change, because=because, lasts_ns=lasts, keys=keys))
    yield from made[:1]
    yield from made[1:][-1:]


def _computing(graphs: Sequence[Graph], plan: Plan) -> tuple[dict[int, int], dict[int, float]]:
    """Returns the stage of each rank, and what each stage usually computes."""
    stages = {place.rank: place.stage for place in plan.ranks}
    return stages, by_stage(stages, median_by_rank([graph.sums(EdgeKind.COMPUTE) for graph in graphs]))


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
    here = by_stage(stages, graph.sums(EdgeKind.COMPUTE))
    factors = {stage: max(1 + (now[stage] - before[stage]) / ns, 0.0) for stage, ns in here.items() if ns > 0}
    return graph.scaled(EdgeKind.COMPUTE, {rank: factors.get(stages[rank], 1.0) for rank in graph.last})


def layers_by_stage(other: FoundPlan, plan: Plan) -> tuple[int, ...] | None:
    """Where they are all that differs, and each stage is one part: which parts of a stage get slower is not known."""
    layers = other.layers()
    return layers if layers and plan.chunks == 1 and len(layers) == len(layers_of(plan)) else None


def replayed_plans(graphs: Sequence[Graph], plan: Plan, every: Sequence[Sequence[int]]) -> Iterator[Change]:
    """Plans whose layers per stage, each of these, are all that differs."""
    if not every:
        return
    (stages, before), layers_now = _computing(graphs, plan), layers_of(plan)
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
    if not all_alike(plan.model):
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


def vocabulary(graphs: Sequence[Graph], plan: Plan) -> Iterator[Change]:
    """An embedding that weighs more than a layer, as evenly divided over the stages as layers are.

    Its head, which computes on the last stage alone, and its part of the update take each stage as long; its all-reduce
    takes as long as that of a layer.
    """
    model, layers = plan.model, layers_of(plan)
    if not all_alike(model) or plan.pipeline < 2 or not layers:
        return
    layer, word = block_numel(model, "layer", 1), model.padded_vocab_size * model.hidden
    if word <= layer:
        return
    last, (stages, before) = plan.pipeline - 1, _computing(graphs, plan)
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
    summed = [sums for graph in graphs if (sums := max(graph.sums(EdgeKind.EMBEDDING).values()))]
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


def _divided(
    graph: Graph, stages: Mapping[int, int], times: Mapping[int, float], weights: Mapping[int, float], part: float
) -> Integers:
    """The lengths with these factors: by stage of passes and of updates, and that of the embedding's all-reduce."""
    lasts = graph.scaled(EdgeKind.COMPUTE, {rank: times.get(stages[rank], 1.0) for rank in graph.last})
    updates = graph.scaled(EdgeKind.OPTIMIZER, {rank: weights[stages[rank]] for rank in graph.last})
    lasts = np.where(graph.kind == EdgeKind.OPTIMIZER, updates, lasts)
    return np.where(graph.kind == EdgeKind.EMBEDDING, (graph.lasts_ns * part).astype(np.int64), lasts)


MS = 1e6
MOST_CHARACTERS = 40
"""The longest text of shares that is spelled out."""


def other_shares(timeline: Timeline, graphs: Sequence[Graph], recorded: Sequence[Graph], plan: Plan) -> Iterator[Gain]:
    """Shares in proportion to how fast the replicas are; what they take is simulated, from mean times of passes.
    `recorded`: the same graphs with the waits for CPU cores."""
    counts = list(plan.micro_batches)
    alone = plan.schedule_file or plan.stream or plan.streams or plan.adapt or not plan.layout.even
    if alone or len(counts) < 2 or not all(counts):
        return
    events = timeline.events
    own = [events[events["iteration"] == graph.iteration] for graph in graphs]
    times = [
        [_times(one, plan, dp, graph.sums(EdgeKind.COMPUTE), was.sums(EdgeKind.COMPUTE)) for dp in range(len(counts))]
        for one, graph, was in zip(own, graphs, recorded, strict=True)
    ]
    try:
        each = [_lengths(plan, one, counts) for one in times]
        paces = [[max(sum(stage.forward) + sum(stage.backward) for stage in dp) for dp in one] for one in times]
        shares = _shares(np.median(paces, axis=0).tolist(), sum(counts), plan.pipeline if plan.chunks > 1 else 1)
        if shares == counts:
            return
        after = [_lengths(plan, one, shares) for one in times]
    except SearchError:
        return
    lengths = np.median(each, axis=0)
    gained = [max(was) - max(then) for was, then in zip(each, after, strict=True)]
    slow, quick = int(np.argmax(lengths)), int(np.argmin(lengths))
    yield Gain(
        cause=Cause.SHARES,
        change=f"shares of the replicas {_spelled(shares)}, as simulated",
        because=(
            f"Replica {slow} takes {lengths[slow] / MS:,.0f} ms for its {counts[slow]} micro-batches, replica {quick} "
            f"{lengths[quick] / MS:,.0f} ms for {counts[quick]}."
        ),
        before_ns=round(float(np.median([graph.now_ns for graph in recorded]))),
        shares=[ns / graph.now_ns for ns, graph in zip(gained, recorded, strict=True)],
        excess=[ns / graph.now_ns for ns, graph in zip(gained, graphs, strict=True)],
        keys={"parallel.shares": dashed(shares)},
    )


def _lengths(plan: Plan, times: Sequence[Sequence[StageTimes]], counts: Sequence[int]) -> list[float]:
    """What each replica's pipeline takes, ns."""
    lists = [schedule(plan.schedule, plan.pipeline, plan.chunks, count) for count in counts]
    return [
        max(event.end for event in simulate(as_json(own, plan.chunks, count), one))
        for one, own, count in zip(times, lists, counts, strict=True)
    ]


def _spelled(shares: Sequence[int]) -> str:
    """Writes shares as `parallel.shares` has them, or the range that they are in where they are long."""
    text = dashed(shares)
    if len(text) <= MOST_CHARACTERS:
        return text
    least, most = min(shares), max(shares)
    return f"from {least} (replica {shares.index(least)}) to {most} micro-batches (replica {shares.index(most)})"


def _times(
    events: pd.DataFrame, plan: Plan, dp: int, worked: Mapping[int, int], took: Mapping[int, int]
) -> list[StageTimes]:
    """What the stages of a replica take for a micro-batch, ns, without waits for a CPU core; messages are free.
    `worked`, `took`: by rank, what it computes without and with these waits."""
    found = []
    for stage in range(plan.pipeline):
        ranks = [place.rank for place in plan.ranks if (place.stage, place.dp) == (stage, dp)]
        own = events[events["rank"].isin(ranks)]
        lasted = (own["end_ns"] - own["start_ns"]) / len(ranks) / max(len(plan.taken_by(stage, dp)), 1)
        lasted = lasted * sum(worked.get(rank, 0) for rank in ranks) / max(sum(took.get(rank, 0) for rank in ranks), 1)
        forward, backward = (
            [
                float(lasted[own["name"].isin(list(names)) & (own["chunk"] == chunk)].sum())
                for chunk in range(plan.chunks)
            ]
            for names in ((*FORWARD, LOSS), BACKWARD)
        )
        found.append(StageTimes(forward=forward, backward=backward, send_forward=0.0, send_backward=0.0))
    return found


def _shares(paces: Sequence[float], total: int, step: int) -> list[int]:
    """Divides micro-batches over replicas whose longest stage takes `paces`: `step` more go to whoever is done first,
    again and again; each gets some."""
    shares = [step] * len(paces)
    for _ in range(total // step - len(paces)):
        quick = min(range(len(paces)), key=lambda dp: (shares[dp] + step) * paces[dp])
        shares[quick] += step
    return shares
