"""What each rank of a plan takes, whatever its stages are."""

from __future__ import annotations

from fasop.costs.layers import Basis
from fasop.costs.training import PlacedTraining
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages
from fasop.simulation.ranks.replay import RankDurations
from fasop.simulation.ranks.replicas import Replicas


def by_rank(plan: PlacedTraining) -> list[RankDurations]:
    """Its own GPU's time to compute and to step; of all else, what its stage takes. Raises SearchError: a profile has
    no costs for a tensor size."""
    parallel = plan.training.parallel
    if not parallel.alike or parallel.stream is not None:
        return HeterogeneousStages(plan).ranks
    ranks = [
        [
            RankDurations(
                times=own.times[stage],
                gradients=own.gradients[stage],
                embedding=own.embedding if stage in (0, parallel.pipeline - 1) else 0.0,
                optimizer=own.optimizer[stage],
                weights=own.weights[stage],
            )
            for stage in range(parallel.pipeline)
        ]
        for own in Replicas(plan).stepping_alone(plan.partition.layers)
    ]
    places = (parallel.layout.stage_dp_tp(rank) for rank in range(parallel.world_size))
    return [ranks[replica][stage] for stage, replica, _ in places]


def basis(plan: PlacedTraining) -> Basis:
    """The worst of what its times rest on. Raises SearchError: a profile has no costs for a tensor size."""
    parallel = plan.training.parallel
    return (Replicas(plan) if parallel.alike and parallel.stream is None else HeterogeneousStages(plan)).basis
