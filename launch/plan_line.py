"""A plan in one line, for people. It needs the plan alone, so that looking at a run imports no configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plan_line(plan: Mapping[str, Any]) -> str:
    """The plan in one line."""
    nodes = plan["nodes"]
    return (
        f"tensor {plan['tensor']} x data {plan['data']} x pipeline {plan['pipeline']}, partition "
        f"{'-'.join(map(str, plan['partition']))}, micro-batch {plan['micro_batch_size']}, global batch "
        f"{plan['global_batch_size']}, {len(plan['ranks'])} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    )
