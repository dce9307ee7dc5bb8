"""All rules of plan.json together."""

from __future__ import annotations

from megatron_ext.contract.plan_check import PlanFault, Values, fault
from megatron_ext.contract.rules import batch, engine, layout, memory, training


def check_rules(plan: Values) -> None:
    """Checks what values have to do with each other, as far as they are there; each alone is known to be right.

    Raises:
        PlanFault: a rule does not hold.
    """
    for part in (batch, memory, layout, training, engine):
        for keys, rule in part.RULES:
            for broken in rule(plan) if all(key in plan for key in keys) else ():
                raise broken if isinstance(broken, PlanFault) else fault(*broken)
