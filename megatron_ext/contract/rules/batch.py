"""How a plan divides its batch, and how that may change while it trains."""

from __future__ import annotations

from typing import Sequence

from megatron_ext.contract.adaptive.config import NONE, BatchRange
from megatron_ext.contract.parallel_config import broken_by_stream
from megatron_ext.contract.plan_check import GRID, Faults, PlanFault, Rules, Values
from megatron_ext.contract.schedule.schedules import OF_ANY_COUNT
from megatron_ext.contract.schedule.streams import PIPEDREAM


def _batch(plan: Values) -> Faults:
    streams = plan.get("streaming") is not None
    if plan.get("replicas") is not None or streams:
        if plan["global_batch_size"] % plan["micro_batch_size"]:
            yield (
                "global_batch_size",
                plan["global_batch_size"],
                f"a multiple of micro_batch_size={plan['micro_batch_size']}",
            )
        elif plan["global_batch_size"] // plan["micro_batch_size"] < plan["data"] and not streams:
            yield (
                "global_batch_size",
                plan["global_batch_size"],
                f"at least one micro-batch for each of {plan['data']} replicas",
            )
        return
    if plan.get("shares") is not None:
        return
    shared = plan.get("context") or 1  # by ranks that take the same micro-batches
    step = plan["data"] // shared * plan["micro_batch_size"]
    if plan["global_batch_size"] % step:
        what = f"data * micro_batch_size = {plan['data'] // shared} * {plan['micro_batch_size']} = {step}"
        yield "global_batch_size", plan["global_batch_size"], f"a multiple of {what}"


def _streams(plan: Values) -> Faults:
    streams, data = plan["streams"], plan["data"]
    if streams is not None and len(streams) != data:
        yield "streams", streams, f"of data={data} numbers"
    if streams is not None and (plan["tensor"], plan["pipeline"]) != (1, 1):
        yield "streams", streams, "null with several stages or a tensor group"


def _shares(plan: Values) -> Faults:
    shares, data, size, batch = (plan[key] for key in ("shares", "data", "micro_batch_size", "global_batch_size"))
    if shares is None:
        return
    if len(shares) != data:
        yield "shares", shares, f"of data={data} numbers"
    if sum(shares) * size != batch:
        yield "shares", shares, f"micro-batches of {size} that together are global_batch_size={batch} samples"
    if plan.get("schedule_file") is not None:
        yield "shares", shares, "null with schedule_file, which is for one number of micro-batches"


def _streaming(plan: Values) -> Faults:
    streaming = plan.get("streaming")
    if (plan["schedule"] == PIPEDREAM and plan["schedule_file"] is None) != (streaming is not None):
        yield "streaming", streaming, f"{'given' if streaming is None else 'null'} with schedule={plan['schedule']}"
    if streaming is None:
        return
    yield from map(PlanFault, broken_by_stream(plan.get, ""))
    if plan["tensor"] > 1 and plan.get("replicas") is not None:
        yield "tensor", plan["tensor"], f"1 with schedule={PIPEDREAM} and different numbers of replicas"
    depth = streaming.get("depth")
    if depth is not None and len(depth) != plan["pipeline"]:
        yield "streaming.depth", depth, f"of pipeline={plan['pipeline']} numbers"


def _adapt(plan: Values) -> Faults:
    adapt = plan.get("adapt")
    if adapt is None:
        return
    with_adapt = "with adapt"
    if plan["schedule"] not in OF_ANY_COUNT or plan.get("schedule_file") is not None:
        yield "schedule", plan["schedule"], f"one of {', '.join(OF_ANY_COUNT)} {with_adapt}"
    if plan.get("replicas") is not None:
        yield "replicas", plan["replicas"], f"null {with_adapt}"
    yield from _micro_batch_sizes(plan, adapt)
    yield from _numbers_of_streams(plan, adapt)
    if adapt.get("rule", NONE) == NONE:
        return
    if plan["train"].get("samples") is None:
        yield "train.samples", None, f"given {with_adapt}.rule"
    if plan["global_batch_size"] < 2 * plan["micro_batch_size"]:
        yield "global_batch_size", plan["global_batch_size"], f"of at least two micro-batches {with_adapt}.rule"
    try:
        BatchRange.between(adapt["lower"], adapt["upper"], plan["micro_batch_size"], plan["data"])
    except ValueError as error:
        yield "adapt.upper", adapt["upper"], f"larger: {error}"


def _micro_batch_sizes(plan: Values, adapt: Values) -> Faults:
    key, sizes, size = "adapt.micro_batch_sizes", adapt.get("micro_batch_sizes"), plan["micro_batch_size"]
    if sizes is None:
        return
    if len(sizes) != plan["data"]:
        yield key, sizes, f"of data={plan['data']} lists"
    if any(size not in of_replica or any(one % size for one in of_replica) for of_replica in sizes):
        yield key, sizes, f"lists of micro_batch_size={size} and multiples of it"
    if not adapt.get("rebalance"):
        yield key, sizes, "null without adapt.rebalance"


def _numbers_of_streams(plan: Values, adapt: Values) -> Faults:
    key, counts = "adapt.streams", adapt.get("streams")
    if counts is None:
        return
    sizes = adapt.get("micro_batch_sizes") or [[plan["micro_batch_size"]]] * plan["data"]
    if [len(of_replica) for of_replica in counts] != [len(of_replica) for of_replica in sizes]:
        yield key, counts, "a list of numbers for each replica and size of its micro-batches"
    if not adapt.get("rebalance"):
        yield key, counts, "null without adapt.rebalance"
    if (plan["tensor"], plan["pipeline"]) != (1, 1):
        yield key, counts, "null with several stages or a tensor group"


def _elastic(plan: Values) -> Faults:
    elastic, nodes = plan.get("elastic"), len(plan["nodes"])
    if elastic is None:
        return
    ranks = elastic.get("ranks", [1] * nodes)
    if len(ranks) != nodes:
        yield "elastic.ranks", ranks, f"of {nodes} numbers, one for each node"
    if elastic.get("plans") is not None:
        yield from _plans_of_node_sets(plan, elastic["plans"])
        return
    replicas = sum(count // plan["tensor"] for count in ranks)
    for key in ("weights", "streams", "micro_batch_sizes", "numbers_of_streams", "times"):
        if elastic.get(key) is not None and len(elastic[key]) != replicas:
            yield f"elastic.{key}", elastic[key], f"of length {replicas}, one entry for each replica of all nodes"
    if plan["pipeline"] > 1:
        yield "pipeline", plan["pipeline"], "1 with elastic, or elastic.plans for sets of nodes"


def _plans_of_node_sets(plan: Values, plans: Sequence[Values]) -> Faults:
    """What a plan that is taken after a loss must say beside what is checked of it then, as of any plan."""
    known = {node["group"] for node in plan["nodes"]}
    for one in plans:
        if not {*one["groups"]} <= known:
            yield "elastic.plans.groups", one["groups"], f"groups of the nodes, which are {', '.join(sorted(known))}"
        if len(one["counts"]) != len(one["groups"]):
            yield "elastic.plans.counts", one["counts"], f"of {len(one['groups'])} numbers, one for each node"


RULES: Rules = [
    (("data", "micro_batch_size", "global_batch_size"), _batch),
    (("streams", "data", "tensor", "pipeline"), _streams),
    (("shares", "data", "micro_batch_size", "global_batch_size"), _shares),
    ((*GRID, "schedule", "schedule_file", "train"), _streaming),
    ((*GRID, "micro_batch_size", "global_batch_size", "schedule", "train"), _adapt),
    (("nodes", "pipeline", "tensor"), _elastic),
]
