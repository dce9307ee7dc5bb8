"""The task that a plan trains: that in the folder of its model's family."""

from __future__ import annotations

from importlib import import_module
from typing import Callable

from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.stage import Stage, threads_for
from megatron_ext.tasks.task import Task


def task_of(plan: Plan) -> Task:
    """The task of a plan's model.

    Raises:
        EngineError: `model.code` leads to nothing that can be trained.
    """
    make: Callable[[Plan], Task] = import_module(f"megatron_ext.families.{plan.model.family}.task").TASK
    return make(plan)


def stage_of(plan: Plan, virtual_stage: int, tensor: TensorGroup) -> Stage:
    """One virtual stage of a plan by itself, with its initial weights."""
    task = task_of(plan)
    stage = Stage(task, cut(task, plan.partition)[virtual_stage], tensor)
    stage.initialise(threads_for(plan))
    return stage
