"""A plan in one line, for people. It needs the plan alone, so that looking at a run imports no configuration."""

from __future__ import annotations

from conf.schema.values.partition import NodeOrder, Partition
from conf.visible import plural
from megatron_ext.contract.plan import Plan


def short_plan(plan: Plan) -> str:
    """Writes a plan for a cell of a table: sizes, partition, micro-batch of the global batch, nodes in their order."""
    sizes = plan.sizes
    return (
        f"tp{sizes['tensor']} dp{sizes['data']} pp{sizes['pipeline']}, {_layers(plan)}, "
        f"batch {plan.micro_batch_size}/{plan.global_batch_size}, "
        f"{NodeOrder(tuple(node.group for node in plan.planned_nodes))}"
    )


def plan_line(plan: Plan) -> str:
    """The plan in one line."""
    return (
        f"{' x '.join(f'{key} {size}' for key, size in plan.sizes.items())}, partition "
        f"{_layers(plan)}, micro-batch {plan.micro_batch_size}, global batch "
        f"{plan.global_batch_size}, {plural(len(plan.ranks), 'rank')} on {plural(len(plan.used), 'node')}"
    )


def _layers(plan: Plan) -> str:
    """Layers by stage, and by island where each has a plan of its own."""
    return "/".join(str(Partition(tuple(own.partition))) for own in plan.by_island)
