"""What a plan with islands may have: groups of replicas that train by themselves for some iterations."""

from __future__ import annotations

from megatron_ext.contract.plan_check import GRID, Faults, Rules, Values

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


RULES: Rules = [((*GRID, "train"), _islands), (("chunks", "schedule_file", "partition", "recompute"), _island_plans)]
