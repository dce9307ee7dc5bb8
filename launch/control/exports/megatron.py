"""A plan as arguments of Megatron-LM's pretrain_gpt.py (core_v0.13 or newer).

Source: megatron/training/arguments.py and docs/user-guide/features/pipeline_parallel_layout.md of Megatron-LM. Its
ranks lie as tdpp's do: tensor groups, then replicas, then stages (`--use-tp-pp-dp-mapping` is left out).
"""

from __future__ import annotations

import shlex

from fasop.search.plan import Plan
from launch.control.megatron_lm import Options, layout_options, model_options, precision_options


def options(plan: Plan) -> Options:
    """Returns what the plan decides, and the model that it is for; data and learning rate are the user's."""
    training = plan.training
    return {
        **model_options(training.model),
        **layout_options(plan.parallel, plan.partition.layers),
        **precision_options(training.precision),
    }


def text(plan: Plan) -> str:
    """Returns a bash array, for `pretrain_gpt.py "${PLAN[@]}" ...`."""
    lines = [
        f"    --{name}" + (f" {shlex.quote(str(value))}" if value != "" else "")
        for name, value in options(plan).items()
        if value is not None
    ]
    return "\n".join(["PLAN=(", *lines, ")"])
