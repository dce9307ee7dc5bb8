"""A plan in one line, for people. It needs the plan alone, so that looking at a run imports no configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.schema.partition import NodeOrder


def short_plan(plan: Mapping[str, Any]) -> str:
    """For a cell of a table: sizes, partition, micro-batch of the global batch, and the nodes in their order."""
    nodes = plan["rehearsal"]["nodes"] if plan["rehearsal"] else plan["nodes"]
    return (
        f"tp{plan['tensor']} dp{plan['data']} pp{plan['pipeline']}, {'-'.join(map(str, plan['partition']))}, "
        f"batch {plan['micro_batch_size']}/{plan['global_batch_size']}, "
        f"{NodeOrder(tuple(node['group'] for node in nodes))}"
    )


def plan_line(plan: Mapping[str, Any]) -> str:
    """The plan in one line."""
    nodes = plan["nodes"]
    return (
        f"tensor {plan['tensor']} x data {plan['data']} x pipeline {plan['pipeline']}, partition "
        f"{'-'.join(map(str, plan['partition']))}, micro-batch {plan['micro_batch_size']}, global batch "
        f"{plan['global_batch_size']}, {len(plan['ranks'])} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    )
