"""The task that a plan trains: that in the folder of its model's family."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Callable

from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.stage import Stage, threads_for
from megatron_ext.tasks.task import Placement, Task


def task_of(plan: Plan) -> Task:
    """The task of a plan's model. Raises EngineError: `model.code` leads to nothing that can be trained."""
    make: Callable[[Plan], Task] = import_module(f"megatron_ext.families.{plan.model.family}.task").TASK
    if len(plan.recompute.stages) == 1 and plan.recompute.layers is None:
        return make(plan)
    task, again = (make(replace(plan, recompute=way)) for way in (Recompute.none, plan.recompute.way))
    of_parts = [plan.recompute.of_stage(part % plan.pipeline) for part in range(len(plan.partition))]
    first = [0 if way == Recompute.none else way.layers or count for way, count in zip(of_parts, plan.partition)]
    counted = iter([number < most for most, count in zip(first, plan.partition) for number in range(count)])
    task.blocks = [
        other if block.placement is Placement.COUNTED and next(counted, False) else block
        for block, other in zip(task.blocks, again.blocks)
    ]
    return task


def stage_of(plan: Plan, virtual_stage: int, tensor: TensorGroup) -> Stage:
    """One virtual stage of a plan by itself, with its initial weights."""
    task = task_of(plan)
    stage = Stage(task, cut(task, plan.partition)[virtual_stage], tensor)
    stage.initialise(threads_for(plan))
    return stage
