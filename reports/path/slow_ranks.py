"""Ranks that compute longer than others with as much work on the same GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conf.visible import rank_ranges
from fasop.costs.layers import Basis
from fasop.simulation.predict import Prediction
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from reports.path.change import Cause, Change
from reports.path.graph import EdgeKind, Graph, median_by_rank

SLOWER = 1.05
"""Times the median of the other ranks of its stage, from which a rank is slow."""
SLOWER_STAGE = 1.2
"""The same beside other stages, for as many layers or as predicted, where a stage has no other ranks."""
SLOWER_ROOFLINE = 1.5
"""The same where the prediction rests on peak rates."""
AS_SLOW = 0.5
"""Ranks of a node that lose this part of what its slowest rank loses are named together with it."""
Peers = Mapping[int, float]
"""How many times as much work a rank has as each rank with as fast a GPU."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What stages are predicted to compute for a micro-batch, in any unit."""

    stages: Sequence[float]
    measured: bool
    """Whether a measured profile says so."""

    @classmethod
    def of(cls, prediction: Prediction | None) -> Expected | None:
        if prediction is None or prediction.by_rank:
            return None
        return cls(
            stages=[sum(stage.times.forward) + sum(stage.times.backward) for stage in prediction.stages],
            measured=prediction.basis != Basis.NOT_MEASURED,
        )


def slow_ranks(graphs: Sequence[Graph], plan: Plan, expected: Expected | None) -> Iterator[Change]:
    """Each as fast as its peers, together those of a node that are about as slow."""
    each = [graph.sums(EdgeKind.COMPUTE) for graph in graphs]
    slow: dict[str, dict[int, Peers]] = {}
    for rank, peers in _beside_peers(graphs, plan, expected).items():
        slow.setdefault(plan.node_of(rank), {})[rank] = peers
    for node, found in slow.items():
        times = {
            rank: float(np.median([one[rank] / _usual(one, peers) for one in each])) for rank, peers in found.items()
        }
        more = max(times.values())
        found = {rank: peers for rank, peers in found.items() if times[rank] - 1 >= (more - 1) * AS_SLOW}
        ranks = rank_ranges(found)
        if len(found) > 1:
            change = f"ranks {ranks} on {node} as fast as their peers"
            because = f"Ranks {ranks} on {node} take up to {more:.2f} times as long to compute as their peers."
        else:
            change = f"rank {ranks} on {node} as fast as its peers"
            because = f"Rank {ranks} on {node} takes {more:.2f} times as long to compute as its peers."
        lasts = [
            graph.scaled(
                EdgeKind.COMPUTE, {rank: _usual(one, peers) / max(one[rank], 1) for rank, peers in found.items()}
            )
            for graph, one in zip(graphs, each, strict=True)
        ]
        yield Change(cause=Cause.RANK, change=change, because=because, lasts_ns=lasts)


def _usual(own: Mapping[int, float], peers: Peers) -> float:
    """What a rank with these peers would compute were it as fast as they are, at least 1 ns."""
    return max(float(np.median([own[other] * work for other, work in peers.items()])), 1.0)


def _beside_peers(graphs: Sequence[Graph], plan: Plan, expected: Expected | None) -> dict[int, Peers]:
    """Ranks that are slow."""
    gpu, stages = gpus(plan), {rank: number for number, stage in enumerate(plan.stages) for rank in stage.ranks}
    own = median_by_rank([graph.sums(EdgeKind.COMPUTE) for graph in graphs])
    # Of a pass, for replicas may take unequal numbers of micro-batches.
    edges = graphs[0].edges
    passes = Counter(rank for rank, _ in {(one.rank, one.event) for one in edges if one.kind is EdgeKind.COMPUTE})
    work, least_of_stages = _work(plan, expected)
    found: dict[int, Peers] = {}
    for rank in own:
        alike = [other for other in own if other != rank and gpu[other] == gpu[rank]]
        same = (other for other in alike if stages[other] == stages[rank] and passes[other] > 0)
        peers, least = {other: passes[rank] / passes[other] for other in same}, SLOWER
        if not peers and rank in work:
            peers, least = {other: work[rank] / work[other] for other in alike if other in work}, least_of_stages
        if peers and own[rank] > least * _usual(own, peers) > least:
            found[rank] = peers
    return found


def _work(plan: Plan, expected: Expected | None) -> tuple[dict[int, float], float]:
    """Returns how much work a rank has in an iteration, where that compares with other stages; and from how many times
    as much time a rank is slow.

    Where nothing is predicted, layers tell: the first and the last stage have an embedding or a head beside them.
    """
    gpu, layers = gpus(plan), layers_of(plan)
    mixed = {number for number, stage in enumerate(plan.stages) if len({gpu[rank] for rank in stage.ranks}) > 1}
    if expected is not None:
        each = {stage: amount for stage, amount in enumerate(expected.stages) if stage not in mixed and amount > 0}
        least = SLOWER_STAGE if expected.measured else SLOWER_ROOFLINE
    else:
        inner = range(1, plan.pipeline - 1) if layers and all_alike(plan.model) else range(0)
        each, least = {stage: float(layers[stage]) for stage in inner if layers[stage]}, SLOWER_STAGE
    found = {
        rank: each[number] * len(plan.taken_by(stage.number, plan.ranks[rank].dp))
        for number, stage in enumerate(plan.stages)
        for rank in stage.ranks
        if number in each
    }
    return {rank: amount for rank, amount in found.items() if amount}, least


def layers_of(plan: Plan) -> list[int]:
    """Returns the layers of each stage; none where the plan does not say."""
    if len(plan.partition) != plan.pipeline * plan.chunks:
        return []
    return [sum(plan.partition[stage :: plan.pipeline]) for stage in range(plan.pipeline)]


def gpus(plan: Plan) -> dict[int, str]:
    """Returns by rank the kind of GPU that it runs on or stands for."""
    kinds = {node.name: node.gpu for node in (*plan.nodes, *(plan.rehearsal.nodes if plan.rehearsal else ()))}
    return {place.rank: kinds.get(plan.node_of(place.rank), "") for place in plan.ranks}


def all_alike(model: ModelConfig) -> bool:
    """Whether all blocks that a partition counts take equally long."""
    return model.traits.attends and len(model.stacks()) == 1
