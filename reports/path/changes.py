"""What each of some changes would bring: the same iteration again, with other lengths of what the change is about.

Computing and messages last as they were recorded, waiting follows anew (`reports/path/graph.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from conf.run_folder.rank_ranges import rank_ranges
from fasop.search.found_plan import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.path.graph import Graph, Integers, Kind

LEAST = 0.01
"""Of an iteration: a change that gains less is not named."""
SLOWER = 1.05
"""Times the median of the other ranks of its stage, from which a rank is slow."""
SLOWER_LAYERS = 1.2
"""The same of a layer beside those of other stages on equal GPUs, where a stage has no other ranks."""
MOST_LAYERS = 64
"""Moved one after another, at most."""


class Cause(StrEnum):
    """What a change is about."""

    RANK = "slow rank"
    LINK = "slow link"
    PARTITION = "uneven partition"
    DATA = "data loading"
    EMBEDDING = "embedding"
    GRADIENTS = "gradients"
    HOST = "host"
    PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of a change."""

    cause: Cause
    change: str
    """In words, such as "the embedding's all-reduce free"."""
    because: str
    """What the change is about, as a sentence."""
    period_ns: int
    """An iteration with it."""
    share: float
    """Of the iteration as it is."""


@dataclass(frozen=True)
class _Change:
    cause: Cause
    change: str
    because: str
    lasts_ns: Integers


def gains(graph: Graph, plan: Plan, searched: Sequence[FoundPlan] = ()) -> list[Gain]:
    """The changes that gain at least LEAST of an iteration, the largest gain first.

    Args:
        searched: plans that a search found. One that differs in its layers per stage alone is replayed; of another one
            the iteration is multiplied by what the prediction says.
    """
    now = graph.period_ns()
    found = []
    layers = [_layers_by_stage(other, plan) for other in searched]
    for one in [*_changes(graph, plan), *_replayed_plans(graph, plan, [known for known in layers if known])]:
        found.append(_gain(one.cause, one.change, one.because, graph.period_ns(one.lasts_ns), now))
    for other, replayed in zip(searched, layers, strict=True):
        if replayed is None:
            period = round(now * other.iteration_s / other.own_s)
            words = ", ".join(f"{key}={value}" for key, value in other.differs.items())
            change = f"the plan of search, by prediction: {words}"
            found.append(_gain(Cause.PLAN, change, "A search predicts another plan to be faster.", period, now))
    return sorted((gain for gain in found if gain.share >= LEAST), key=lambda gain: gain.period_ns)


def _gain(cause: Cause, change: str, because: str, period_ns: int, now_ns: int) -> Gain:
    share = 1 - period_ns / now_ns if now_ns else 0.0
    return Gain(cause=cause, change=change, because=because, period_ns=period_ns, share=share)


def _changes(graph: Graph, plan: Plan) -> Iterator[_Change]:
    stages = {place.rank: place.stage for place in plan.ranks}
    computing = _computing(graph)
    yield from _slow_ranks(graph, plan, stages, computing)
    yield from _layers(graph, plan, stages, computing)
    yield from _links(graph, plan, stages)
    for kind, cause, change, what in (
        (Kind.DATA, Cause.DATA, "data loading free", "Loading data"),
        (Kind.EMBEDDING, Cause.EMBEDDING, "the embedding's all-reduce free", "The embedding's all-reduce"),
        (Kind.GRADIENTS, Cause.GRADIENTS, "the gradients' all-reduce free", "The gradients' all-reduce"),
        (Kind.HOST, Cause.HOST, "no time between the recorded events", "What lies between the recorded events"),
    ):
        chosen = graph.kind == kind
        if most := int(graph.by_rank(np.where(chosen, graph.lasts_ns, 0)).max()):
            because = f"{what} takes {most / 1e6:,.1f} ms of an iteration."
            yield _Change(cause, change, because, np.where(chosen, 0, graph.lasts_ns))


def _computing(graph: Graph) -> dict[int, int]:
    """By rank, ns."""
    sums = graph.by_rank(np.where(graph.kind == Kind.COMPUTE, graph.lasts_ns, 0))
    return {rank: int(sums[rank]) for rank in graph.last}


def _scaled(graph: Graph, factors: Mapping[int, float]) -> Integers:
    """The lengths with the computing of each rank that has a factor times it."""
    every = np.ones(max(graph.last) + 1)
    for rank, factor in factors.items():
        every[rank] = factor
    return graph.scaled(Kind.COMPUTE, every)


def _layers_of(plan: Plan) -> list[int]:
    """Of each stage; none where the plan does not say."""
    if len(plan.partition) != plan.pipeline * plan.chunks:
        return []
    return [sum(plan.partition[stage :: plan.pipeline]) for stage in range(plan.pipeline)]


def _gpu(plan: Plan) -> dict[int, str]:
    """By rank, the kind of GPU that it runs on or stands for."""
    kinds = {node.name: node.gpu for node in (*plan.nodes, *(plan.rehearsal.nodes if plan.rehearsal else ()))}
    return {place.rank: kinds.get(plan.node_of(place.rank), "") for place in plan.ranks}


def _slow_ranks(graph: Graph, plan: Plan, stages: Mapping[int, int], computing: Mapping[int, int]) -> Iterator[_Change]:
    """Ranks that compute longer than others with the same work on the same GPUs, all of a node together."""
    gpu, layers = _gpu(plan), _layers_of(plan)
    # Of a pass, for replicas may take unequal numbers of micro-batches.
    passes = Counter(rank for rank, _ in {(one.rank, one.event) for one in graph.edges if one.kind is Kind.COMPUTE})
    each = {rank: own / max(passes[rank], 1) for rank, own in computing.items()}
    slow: dict[str, dict[int, float]] = {}
    for rank, own in each.items():
        alike = [other for other in each if other != rank and gpu[other] == gpu[rank]]
        peers = [each[other] for other in alike if stages[other] == stages[rank]]
        least = SLOWER
        if not peers and _inner(rank, plan, stages, layers):
            # A layer takes as long in every stage; only the ends have an embedding or a head beside them.
            inner = [other for other in alike if _inner(other, plan, stages, layers)]
            peers = [each[other] * layers[stages[rank]] / layers[stages[other]] for other in inner]
            least = SLOWER_LAYERS
        usual = float(np.median(peers)) if peers else 0.0
        if own > least * usual > 0:
            slow.setdefault(plan.node_of(rank), {})[rank] = usual / own
    for node, factors in slow.items():
        ranks, more = rank_ranges(factors), 1 / min(factors.values())
        if len(factors) > 1:
            change = f"ranks {ranks} on {node} as fast as their peers"
            because = f"Ranks {ranks} on {node} compute up to {more:.2f} times as long as their peers."
        else:
            change = f"rank {ranks} on {node} as fast as its peers"
            because = f"Rank {ranks} on {node} computes {more:.2f} times as long as its peers."
        yield _Change(Cause.RANK, change, because, _scaled(graph, factors))


def _inner(rank: int, plan: Plan, stages: Mapping[int, int], layers: Sequence[int]) -> bool:
    return 0 < stages[rank] < plan.pipeline - 1 and bool(layers) and layers[stages[rank]] > 0


def _layers(graph: Graph, plan: Plan, stages: Mapping[int, int], computing: Mapping[int, int]) -> Iterator[_Change]:
    """Layers moved from the stage that computes longest to the one that is done first: one, and as many as help."""
    layers, before = _layers_of(plan), _by_stage(stages, computing)
    if len(before) < 2 or not layers:
        return
    each = _layer_ns(plan, before, layers)
    longest, shortest = max(before, key=lambda stage: before[stage]), min(before, key=lambda stage: before[stage])
    because = (
        f"Stage {longest} computes longest, {before[longest] / 1e6:,.1f} ms of an iteration; stage {shortest} "
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
        lasts = _scaled(graph, _factors(stages, computing, before, now))
        period = graph.period_ns(lasts)
        if period >= best:
            break
        best = period
        if moved == 1:
            yield _Change(Cause.PARTITION, f"a layer moved from stage {slow} to stage {quick}", because, lasts)
        else:
            change = _Change(Cause.PARTITION, f"layers by stage {'-'.join(map(str, left))}", because, lasts)
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


def _layers_by_stage(other: FoundPlan, plan: Plan) -> tuple[int, ...] | None:
    """Where they are all that differs, and each stage is one part: which parts of a stage get slower is not known."""
    layers = other.layers()
    return layers if layers and plan.chunks == 1 and len(layers) == len(_layers_of(plan)) else None


def _replayed_plans(graph: Graph, plan: Plan, every: Sequence[Sequence[int]]) -> Iterator[_Change]:
    """Plans whose layers per stage, each of these, are all that differs."""
    if not every:
        return
    stages, computing, own = {place.rank: place.stage for place in plan.ranks}, _computing(graph), _layers_of(plan)
    before = _by_stage(stages, computing)
    each = _layer_ns(plan, before, own)
    for layers in every:
        now = {stage: max(ns + each[stage] * (layers[stage] - own[stage]), 0.0) for stage, ns in before.items()}
        change = f"layers by stage {'-'.join(map(str, layers))}, the best that search finds for these sizes"
        because = f"A search finds layers that share the work better than {'-'.join(map(str, own))}."
        yield _Change(Cause.PARTITION, change, because, _scaled(graph, _factors(stages, computing, before, now)))


def _layer_ns(plan: Plan, computing: Mapping[int, float], layers: Sequence[int]) -> dict[int, float]:
    """What a layer takes on each stage. The ends also compute an embedding or a head: where an inner stage has the same
    GPUs, its layers tell."""
    gpu = _gpu(plan)
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
            found[stage] = own.get(stage, float(np.median(list(own.values()))) if own else 0.0)
    return found


def _links(graph: Graph, plan: Plan, stages: Mapping[int, int]) -> Iterator[_Change]:
    """Each link between two stages, twice as fast in both directions."""
    between: dict[tuple[int, int], list[int]] = {}
    for number in np.flatnonzero(graph.sender >= 0).tolist():
        ends = sorted((stages[int(graph.sender[number])], stages[int(graph.on[number])]))
        between.setdefault((ends[0], ends[1]), []).append(number)
    for (one, other), numbers in between.items():
        lasts = graph.lasts_ns.copy()
        lasts[numbers] //= 2
        usual = float(np.median(graph.lasts_ns[numbers])) / 1e6
        because = f"A message between stage {one} and stage {other} takes {usual:,.2f} ms."
        yield _Change(Cause.LINK, f"the link between stages {one} and {other} twice as fast", because, lasts)
