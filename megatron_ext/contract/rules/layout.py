"""How a plan lays stages on ranks, ranks on nodes, and islands: replicas that train by themselves for a while."""

from __future__ import annotations

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import family_named
from megatron_ext.contract.parallel_config import broken_by_chunks, broken_by_replicas
from megatron_ext.contract.plan_check import GRID, Faults, PlanFault, Rules, Values, fault


def _partition(plan: Values) -> Faults:
    parts, pipeline, chunks = plan["partition"], plan["pipeline"], plan["chunks"]
    if plan.get("island_plans") is not None:
        for number, own in enumerate(plan["island_plans"]):
            where = {"partition": own["partition"], "pipeline": own["pipeline"], "chunks": 1, "model": plan["model"]}
            for broken in _partition(where):
                yield PlanFault(
                    f"island_plans[{number}]: {broken if isinstance(broken, PlanFault) else fault(*broken)}"
                )
            if len(own["tensors"]) != own["pipeline"]:
                yield f"island_plans[{number}].tensors", own["tensors"], f"of pipeline={own['pipeline']} numbers"
        return
    if len(parts) != pipeline * chunks:
        yield "partition", parts, f"of pipeline * chunks = {pipeline} * {chunks} = {pipeline * chunks} numbers"
    model = plan["model"]
    layers = model.get("layers", sum(parts))
    words = f"model.layers={layers}"
    if family_named(model.get("family", DEFAULT)).decoder and "layers" in model:
        decoder = layers if model.get("decoder_layers") is None else model["decoder_layers"]
        words = f"{words} + model.decoder_layers={decoder} = {layers + decoder}"
        layers += decoder
    if sum(parts) != layers:
        yield "partition", parts, f"of numbers that add up to {words}, not to {sum(parts)}"


def _schedule(plan: Values) -> Faults:
    yield from map(PlanFault, broken_by_chunks(plan.get, ""))


def _by_stage(plan: Values) -> Faults:
    for key, largest in (("tensors", "tensor"), ("replicas", "data")):
        sizes = plan.get(key)
        if sizes is None:
            continue
        if len(sizes) != plan["pipeline"]:
            yield key, sizes, f"of pipeline={plan['pipeline']} numbers"
        elif len(set(sizes)) == 1:
            yield key, sizes, f"null where all stages are alike, with {largest}={sizes[0]}"
        elif max(sizes) != plan[largest]:
            yield largest, plan[largest], f"the largest of {key}={sizes}"
    if plan.get("replicas") is None:
        return
    yield from map(PlanFault, broken_by_replicas(plan.get, "", plan["data"]))


def _ranks(plan: Values) -> Faults:
    grid = Layout.grid(*(plan[key] for key in GRID))
    islands = zip(plan.get("island_plans") or (), plan.get("islands") or ())
    parts = [Layout(tuple(one["tensors"]), (size,) * one["pipeline"]) for one, size in islands]
    layout = (
        Layout.joined(parts)
        if parts
        else Layout(tuple(plan.get("tensors") or grid.tensors), tuple(plan.get("replicas") or grid.replicas))
    )
    ranks, count = plan["ranks"], layout.world_size
    sizes = f"tensor * data * pipeline = {plan['tensor']} * {plan['data']} * {plan['pipeline']}"
    order = "rank = (stage * data + dp) * tensor + tp"
    if layout != grid:
        sizes, order = "the sum over stages of tensor size * replicas", "its place, stage by stage"
        order = f"{order}, island by island" if parts else order
    if len(ranks) != count:
        yield "ranks", [place.get("rank") for place in ranks], f"{sizes} = {count}, 0 to {count - 1}"
    for number, place in enumerate(ranks):
        own = {"rank": number, **dict(zip(("stage", "dp", "tp"), layout.stage_dp_tp(number)))}
        for key, wanted in own.items():
            if place.get(key, wanted) != wanted:
                yield f"ranks[{number}].{key}", place[key], f"{wanted}: {order}"


def _nodes(plan: Values) -> Faults:
    nodes, ranks = plan["nodes"], plan["ranks"]
    names = [node.get("name", number) for number, node in enumerate(nodes)]
    if len(set(names)) < len(names):
        yield "nodes", names, "of different names"
    held = [rank for node in nodes for rank in node.get("ranks", ())]
    if all("ranks" in node for node in nodes) and sorted(held) != list(range(len(ranks))):
        yield "nodes", [node["ranks"] for node in nodes], f"given each of the ranks 0 to {len(ranks) - 1} once"
    for number, place in enumerate(ranks):
        node, local = place.get("node"), place.get("local_rank")
        if node is None:
            continue
        if node >= len(nodes):
            yield f"ranks[{number}].node", node, f"below {len(nodes)}, the number of nodes"
        if local is not None and nodes[node].get("ranks", [])[local : local + 1] not in ([], [number]):
            yield f"ranks[{number}].local_rank", local, f"its place in nodes[{node}].ranks={nodes[node]['ranks']}"


def _blocks(plan: Values) -> Faults:
    blocks = plan.get("blocks")
    if blocks is not None and plan.get("island_plans") is None and len(blocks) != sum(plan["partition"]):
        yield "blocks", blocks, f"{sum(plan['partition'])} names, as many as partition has blocks"


WHY_NOT = {
    "streaming": "its stages update at different times",
    "replicas": "an island consists of whole pipelines",
    "sharded_optimizer": "every replica keeps the optimizer's whole state, whatever the size of its island",
    "hierarchical_stages": "only the replicas of one island sum their gradients",
    "adapt": "an island counts by the samples that it takes, which must stay the same",
    "elastic": "the weights of an island are lost with it",
    "rehearsal": "rehearsals sum gradients in every iteration",
}
"""Why a key of plan.json does not go with islands."""


def _islands(plan: Values) -> Faults:
    islands, data = plan.get("islands"), plan["data"]
    if (islands is None) != (plan["train"].get("sync_every") is None):
        yield "islands", islands, f"{'given' if islands is None else 'null'} with this train.sync_every"
    if islands is None:
        return
    if len(islands) < 2 or sum(islands) != data:
        yield "islands", islands, f"two numbers or more, that together are data={data}"
    for key, why in WHY_NOT.items():
        if plan.get(key):
            yield key, plan[key], f"null or false with islands: {why}"


def _island_plans(plan: Values) -> Faults:
    plans = plan.get("island_plans")
    if plans is None:
        return
    if len(plans) != len(plan.get("islands") or ()):
        yield "island_plans", plans, f"one for each of islands={plan.get('islands')}"
    for key, value, only in (
        ("chunks", plan["chunks"], 1),
        ("schedule_file", plan["schedule_file"], None),
        ("partition", plan["partition"], []),
        ("tensors", plan.get("tensors"), None),
        ("scattered_cuts", plan.get("scattered_cuts"), None),
        ("offloads", plan.get("offloads"), None),
    ):
        if value != only:
            yield key, value, f"{only} with island_plans"
    if "-" in plan["recompute"]:
        yield "recompute", plan["recompute"], "one for all stages with island_plans"


RULES: Rules = [
    (("partition", "pipeline", "chunks", "model"), _partition),
    (("schedule", "schedule_file", "chunks", "pipeline"), _schedule),
    (GRID, _by_stage),
    ((*GRID, "ranks"), _ranks),
    (("nodes", "ranks"), _nodes),
    (("partition",), _blocks),
    ((*GRID, "train"), _islands),
    (("chunks", "schedule_file", "partition", "recompute"), _island_plans),
]
