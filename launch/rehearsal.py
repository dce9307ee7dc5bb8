"""How long everything takes that a rehearsal does not do: from the GPUs' profiles and the cluster's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.errors import ConfigError
from conf.profile import ModelCosts, read_profile
from conf.schema import Experiment, NodeGroup, Precision

OPTIMIZER_BYTES = 28
"""Memory traffic of an Adam step per parameter: weight, gradient and two moments read, all but the gradient written."""


def rehearsal_times(experiment: Experiment, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By rank, nanoseconds: `rehearsal.ranks` of plan.json (docs/formats.md).

    A transfer takes latency + bytes / bandwidth, where a node's link to others is shared by all its ranks, as they
    all send at about the same time; an all-reduce of n ranks 2 (n - 1) / n times its bytes (ring; Patarasuk and Yuan
    2009). Gradients count as all-reduced after the backward pass, unhidden. The optimizer is bound by memory.

    Raises:
        ConfigError: a GPU has no profile, or none for this model and these sizes.
    """
    return [_rank(experiment, plan, place) for place in plan["ranks"]]


def _rank(experiment: Experiment, plan: Mapping[str, Any], place: Mapping[str, int]) -> dict[str, Any]:
    parallel, model = experiment.parallel, experiment.model
    group = experiment.cluster.groups[plan["nodes"][place["node"]]["group"]]
    costs = _costs(experiment, group)
    stages, last = parallel.pipeline, len(plan["partition"]) - 1
    forward, backward, parameters = [], [], 0
    for virtual in range(place["stage"], last + 1, stages):
        layers = plan["partition"][virtual]
        parts = [(costs.layer, layers), (costs.embedding, int(virtual == 0)), (costs.head, int(virtual == last))]
        forward.append(_ns(sum(cost.forward * count for cost, count in parts)))
        backward.append(_ns(sum(cost.backward * count for cost, count in parts)))
        parameters += layers * (12 * model.hidden**2 + 13 * model.hidden) // parallel.tensor
    embedding = model.padded_vocab(parallel.tensor) * model.hidden // parallel.tensor
    ends = place["stage"] in (0, stages - 1)
    parameters += embedding if ends else 0
    width = 4 if experiment.train.precision is Precision.fp32 else 2
    message = parallel.micro_batch_size * model.sequence_length * model.hidden * width
    gpu = experiment.cluster.gpus[group.gpu]
    links = _Links(experiment, plan)
    following = (place["stage"] + 1) % stages, place["dp"], place["tp"]
    previous = (place["stage"] - 1) % stages, place["dp"], place["tp"]
    replicas = [links.rank(place["stage"], dp, place["tp"]) for dp in range(parallel.data)]
    both_ends = [links.rank(stage, place["dp"], place["tp"]) for stage in (0, stages - 1)]
    return {
        "forward_ns": forward,
        "backward_ns": backward,
        "send_forward_ns": links.transfer_ns([place["rank"], links.rank(*following)], message),
        "send_backward_ns": links.transfer_ns([place["rank"], links.rank(*previous)], message),
        "grads_all_reduce_ns": links.all_reduce_ns(replicas, 4 * parameters),
        "embedding_all_reduce_ns": links.all_reduce_ns(both_ends, 4 * embedding) if ends and stages > 1 else 0,
        "optimizer_ns": int(parameters * OPTIMIZER_BYTES / gpu.memory_gb_per_s),
    }


def _costs(experiment: Experiment, group: NodeGroup) -> ModelCosts:
    gpu = experiment.cluster.gpus[group.gpu]
    if gpu.profile is None:
        raise ConfigError(
            f"executor.rehearse={experiment.executor.rehearse} needs to know how long layers take on {gpu.name}, but "
            f"cluster.gpus.{group.gpu}.profile is null; name one of fasop/profiles"
        )
    parallel = experiment.parallel
    return read_profile(gpu.profile).of(experiment.model.name, parallel.tensor, parallel.micro_batch_size)


class _Links:
    """How long messages take between ranks of a plan."""

    def __init__(self, experiment: Experiment, plan: Mapping[str, Any]) -> None:
        self._parallel = experiment.parallel
        self._nodes = [place["node"] for place in plan["ranks"]]
        self._groups = [experiment.cluster.groups[node["group"]] for node in plan["nodes"]]
        self._sharing = [len(node["ranks"]) for node in plan["nodes"]]

    def rank(self, stage: int, dp: int, tp: int) -> int:
        return (stage * self._parallel.data + dp) * self._parallel.tensor + tp

    def transfer_ns(self, ranks: Sequence[int], size: int) -> int:
        """Nanoseconds for `size` bytes among `ranks`; the slowest of their links counts."""
        nodes = {self._nodes[rank] for rank in ranks}
        if len(nodes) == 1:
            groups = [self._groups[node] for node in nodes]
            return max(int(g.intra_latency_us * 1e3 + size * 8 / g.intra_gbit_per_s) for g in groups)
        return max(
            int(self._groups[n].inter_latency_us * 1e3 + size * 8 * self._sharing[n] / self._groups[n].inter_gbit_per_s)
            for n in nodes
        )

    def all_reduce_ns(self, ranks: Sequence[int], size: int) -> int:
        """Nanoseconds of a ring all-reduce; 0 for one rank."""
        count = len(ranks)
        return 2 * (count - 1) * self.transfer_ns(ranks, size // count) if count > 1 else 0


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
