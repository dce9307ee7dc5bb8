"""The loss and the metrics of a checkpoint over held-out samples, in one process, whatever the task is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Dict, NamedTuple, Optional

import torch
from torch import Tensor

from megatron_ext.checkpoints.header import part_name
from megatron_ext.checkpoints.meta import Checkpoint, require_model
from megatron_ext.checkpoints.part_tensors import read_part
from megatron_ext.checkpoints.tensors import STATE
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import BEST, CHECKPOINTS, LATEST, WEIGHTS
from megatron_ext.engine.evaluation import evaluate_whole
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import check, cut_between
from megatron_ext.tasks.stage import Stage
from megatron_ext.tasks.task import Micro, Task, Tensors

SAMPLES = 1024
"""That are taken where nobody knows how many there are."""


class Measured(NamedTuple):
    """Over all samples."""

    samples: int
    loss: float
    metrics: Dict[str, float]


def whole_model(task: Task, checkpoint: Checkpoint, device: torch.device, kind: str = WEIGHTS) -> Stage:
    """A task's model in one piece with a checkpoint's weights of a kind, in fp32, as it is after training. Raises
    EngineError: a part of the checkpoint is missing, damaged or of another model."""
    check(task)
    stage = Stage(task, cut_between(task, [task.blocks])[0], TensorGroup())
    stage.place(device, torch.float32)
    parts: Dict[str, Dict[str, Tensor]] = {}

    def kept(block: str, name: str, like: Tensor, rows: Optional[int]) -> Tensor:
        path = checkpoint.part(part_name(block))
        if block not in parts:
            parts[block] = read_part(checkpoint, part_name(block))
        found = parts[block].get(name)
        shape = list(like.shape) if rows is None else [rows, *like.shape[1:]]
        if found is None or list(found.shape) != shape:
            described = "none" if found is None else str(list(found.shape))
            raise EngineError(f"{path}: expected a tensor {name} of shape {shape}, found {described}")
        return found

    for name, parameter in stage.parameters_by_name():
        block, inner = stage.places[name]
        rows = task.rows(name)
        whole = torch.zeros(parameter.shape)
        whole[: len(whole) if rows is None else rows] = kept(block, f"{kind}/{inner}", parameter, rows)
        parameter.data = whole.to(device)
    for block, inner, tensor in stage.state:
        tensor.data.copy_(kept(block, f"{STATE}/{inner}", tensor, None))
    return stage.eval().requires_grad_(False)


def measure(
    plan: Plan,
    checkpoint: Checkpoint,
    split: str,
    samples: Optional[int] = None,
    device: str = "cpu",
    kind: str = WEIGHTS,
) -> Measured:
    """What a run's task says of a split of its data, with weights of this kind: all of it once, or at most its first
    `samples`.

    A micro-batch has as many samples as in the run, but for the last. A loss that is a sum is divided by the weight of
    all, others count by their samples.

    Raises:
        EngineError: the checkpoint or the data cannot be used.
    """
    require_model(checkpoint, plan.model.identity())
    task = task_of(replace(plan, recompute=Recompute.none))
    stage = whole_model(task, checkpoint, torch.device(device), kind)
    in_epoch = task.samples(split, 1).in_epoch
    count = min(samples or in_epoch or SAMPLES, in_epoch or samples or SAMPLES)
    source = task.samples(split, count)

    def forward(micro: Micro) -> Tensors:
        stage.begin(micro.first)
        with torch.no_grad():
            left: Tensors = stage({name: micro.inputs[name] for name in stage.inputs})
        for tensor in left.values():  # a user's loss is checked to have a gradient, as in training
            tensor.requires_grad_(tensor.is_floating_point())
        return left

    means = dict(evaluate_whole(task, source, count, plan.micro_batch_size, forward, torch.device(device)))
    return Measured(count, means.pop("loss"), means)


def checkpoint_of(run: Path, name: Optional[str]) -> Checkpoint:
    """The newest checkpoint of a run's folder, or the one called so. Raises EngineError: there is none."""
    if name is None:
        return Checkpoint.at(run)
    folder = run / CHECKPOINTS / name
    if name in (BEST, LATEST) and folder.is_file():
        return Checkpoint.at(folder)
    if not folder.is_dir():
        every = sorted(path.name for path in folder.parent.glob("*"))
        there = [one for one in every if one == BEST or one.startswith("iter_")]
        raise EngineError(f"--checkpoint {name}: the run has {', '.join(there) or 'no checkpoint'}")
    return Checkpoint.read(folder)
