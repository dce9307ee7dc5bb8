"""The task that a plan trains, by the family of its model."""

from __future__ import annotations

from typing import Callable, Dict

from megatron_ext.contract.models.model import AWD_LM, BERT, GNMT, GPT, IMAGES, MODULE, S2VT, T5, TRANSFORMER
from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.images.image_task import ImageTask
from megatron_ext.tasks.language.awd_lm import AwdLmTask
from megatron_ext.tasks.language.bert import BertTask
from megatron_ext.tasks.language.gpt import GptTask
from megatron_ext.tasks.language.t5 import T5Task
from megatron_ext.tasks.stage import Stage, threads_for
from megatron_ext.tasks.task import Task
from megatron_ext.tasks.translation.gnmt import GnmtTask
from megatron_ext.tasks.translation.s2vt import S2vtTask
from megatron_ext.tasks.translation.transformer import TransformerTask
from megatron_ext.tasks.user.module import users_task

FAMILIES: Dict[str, Callable[[Plan], Task]] = {
    GPT: GptTask,
    BERT: BertTask,
    T5: T5Task,
    TRANSFORMER: TransformerTask,
    GNMT: GnmtTask,
    AWD_LM: AwdLmTask,
    S2VT: S2vtTask,
    MODULE: users_task,
    **dict.fromkeys(IMAGES, ImageTask),
}


def task_of(plan: Plan) -> Task:
    """The task of a plan's model.

    Raises:
        EngineError: `model.code` leads to nothing that can be trained.
    """
    return FAMILIES[plan.model.family](plan)


def stage_of(plan: Plan, virtual_stage: int, tensor: TensorGroup) -> Stage:
    """One virtual stage of a plan by itself, with its initial weights."""
    task = task_of(plan)
    stage = Stage(task, cut(task, plan.partition)[virtual_stage], tensor)
    stage.initialise(threads_for(plan))
    return stage
