"""How long everything takes that a rehearsal does not do: from the GPUs' profiles and the cluster's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf import links, overlap, placement, sizes
from conf.errors import ConfigError
from conf.links import Link
from conf.placement import Placed, Use
from conf.profile import ModelCosts, optimizer_s_per_parameter, read_profile
from conf.schema import Experiment, NodeGroup


def rehearsal_times(experiment: Experiment, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By rank, nanoseconds: `rehearsal.ranks` of plan.json (docs/formats.md).

    A rank takes its own GPU's time to compute; of a message or a collective the slowest link counts (conf/links.py,
    conf/placement.py). Of the gradients' all-reduce that is left which the backward pass does not hide
    (conf/overlap.py).
    The optimizer takes what its profile says, or what memory allows.

    Raises:
        ConfigError: a GPU has no profile, or none for this model, these sizes and this number format.
    """
    parallel = experiment.parallel
    nodes = [len(node["ranks"]) for node in plan["nodes"]]
    placed = placement.placed(nodes, parallel.tensor, parallel.data, parallel.pipeline)
    known = {name: _costs(experiment, experiment.cluster.groups[name]) for name in experiment.node_order.groups}
    return [_rank(experiment, plan, place, placed, known) for place in plan["ranks"]]


def doubts(experiment: Experiment) -> list[str]:
    """What is hard to believe of the profiles that a rehearsal takes its times from, in words.

    Raises:
        ConfigError: a profile cannot be read.
    """
    gpus = dict.fromkeys(experiment.cluster.groups[name].gpu for name in experiment.node_order.groups)
    names = dict.fromkeys(experiment.cluster.gpus[gpu].profile for gpu in gpus)
    return [
        f"profile {name!r}: {doubt}"
        for name in names
        if name is not None
        for doubt in read_profile(name).doubts(experiment.model)
    ]


def _rank(
    experiment: Experiment,
    plan: Mapping[str, Any],
    place: Mapping[str, int],
    placed: Placed,
    known: Mapping[str, tuple[ModelCosts, float]],
) -> dict[str, Any]:
    parallel, model = experiment.parallel, experiment.model
    groups = [experiment.cluster.groups[node["group"]] for node in plan["nodes"]]
    costs, optimizer_s = known[plan["nodes"][place["node"]]["group"]]
    stage = place["stage"]
    stages, last = parallel.pipeline, len(plan["partition"]) - 1
    forward, backward, layers = [], [], 0
    for virtual in range(stage, last + 1, stages):
        here = plan["partition"][virtual]
        parts = [(costs.layer, here), (costs.embedding, int(virtual == 0)), (costs.head, int(virtual == last))]
        forward.append(_ns(sum(cost.forward * count for cost, count in parts)))
        backward.append(_ns(sum(cost.backward * count for cost, count in parts)))
        layers += here
    is_first, is_last = stage == 0, stage == stages - 1
    parameters = layers * sizes.layer_parameters(model, parallel.tensor)
    parameters += sizes.embedding_parameters(model, parallel.tensor) if is_first else 0
    parameters += sizes.head_parameters(model, parallel.tensor, own_word=not is_first) if is_last else 0
    message = sizes.activation_bytes(model, parallel.micro_batch_size, experiment.train.precision)
    ahead, back = (_slowest(groups, placed.hops[hop]) for hop in (stage, stage - 1))
    summed = overlap.exposed_s(
        _slowest(groups, placed.sums[stage]).all_reduce(parallel.data),
        model,
        parallel.tensor,
        layers=layers,
        parameters=parameters,
        backward_s=overlap.filling(parallel.schedule) * costs.layer.backward * 1e-3,
        first=is_first,
    )
    word = overlap.SUM_BYTES * sizes.word_parameters(model, parallel.tensor)
    shared = _slowest(groups, placed.embedding).all_reduce(2).takes(word)
    return {
        "forward_ns": forward,
        "backward_ns": backward,
        "send_forward_ns": _ns(ahead.takes(message) * 1e3),
        "send_backward_ns": _ns(back.takes(message) * 1e3),
        "busy_forward_ns": _ns(message * ahead.s_per_byte * 1e3),
        "busy_backward_ns": _ns(message * back.s_per_byte * 1e3),
        "one_way_out": placed.one_way_out[stage],
        "grads_all_reduce_ns": _ns(summed * 1e3),
        "embedding_all_reduce_ns": _ns(shared * 1e3) if is_first != is_last else 0,
        "optimizer_ns": _ns(parameters * optimizer_s * 1e3),
    }


def _slowest(groups: Sequence[NodeGroup], uses: Sequence[Use]) -> Link[float]:
    """The largest latency, and the lowest share of a bandwidth, of links that are used together."""
    used = [
        links.between(groups[use.node], use.sharing) if use.between else links.within(groups[use.node]) for use in uses
    ]
    return Link(latency_s=max(link.latency_s for link in used), s_per_byte=max(link.s_per_byte for link in used))


def _costs(experiment: Experiment, group: NodeGroup) -> tuple[ModelCosts, float]:
    """Of the parts of the model, and the seconds that the optimizer takes for a parameter."""
    gpu = experiment.cluster.gpus[group.gpu]
    if gpu.profile is None:
        raise ConfigError(
            f"executor.rehearse={experiment.executor.rehearse} needs to know how long layers take on {gpu.name}, but "
            f"cluster.gpus.{group.gpu}.profile is null; name one of fasop/profiles, or the path of a .yaml file"
        )
    parallel, precision, profile = experiment.parallel, experiment.train.precision, read_profile(gpu.profile)
    costs = profile.of(experiment.model, parallel.tensor, parallel.micro_batch_size, precision)
    return costs, optimizer_s_per_parameter(gpu, profile, precision)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
