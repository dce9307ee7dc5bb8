"""What the blocks of a model made of layers take on a rank, by kind: the engine's own modules, there and back."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.measuring.medians import Median
from megatron_ext.measuring.passes import Keeping, Passes
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.families import task_of
from megatron_ext.tasks.linear import WeightGradients
from megatron_ext.tasks.stage import Stage, backward
from megatron_ext.tasks.task import DTYPES, Tensors

LAYERS = 4
"""Layers in a row, or as many as the model has: so weights come from memory as often as in a stage of a few layers, and
what a pass costs once is shared out."""


def few_layers(model: ModelConfig) -> ModelConfig:
    """The same model with `LAYERS` in a row, or as many as it has."""
    decoder = min(LAYERS, model.decoder_count) or None
    return replace(model, layers=min(LAYERS, model.layers), decoder_layers=decoder)


class Parts(Passes):
    """One rank's share of a model of some layers, and a micro-batch that goes through it again and again."""

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size; the number format is that of `plan.train`."""
        few = few_layers(model)
        self.layers = few.counted
        task = task_of(replace(plan, model=few, recompute="none"))
        held = [list(blocks) for _, blocks in groupby(task.blocks, key=lambda block: block.kind)]
        self._counts = [(blocks[0].kind, len(blocks)) for blocks in held]
        """Neighbours of one kind, and how many they are."""
        self._tensor = tensor
        self._task = task
        owned: Dict[str, nn.Parameter] = {}
        self._stages = [Stage(task, part, tensor, owned) for part in cut_between(task, held)]
        for stage in self._stages:
            stage.initialise(1)
        flat = FlatWeights(
            [named for stage in self._stages for named in stage.parameters_by_name()],
            DTYPES[plan.train.precision],
            device,
        )
        if not plan.train.compile:  # as in the engine
            shared = [parameter for stage in self._stages for parameter in stage.shared]
            for stage in self._stages:
                stage.defer_weight_grads(WeightGradients(flat.add, flat.add_rows), shared, flat.adds)
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = task.example(micro_batch_size, source).to(device)
        ways = [(f"{kind}.forward", count) for kind, count in self._counts]
        back = [(f"{kind}.backward", count) for kind, count in reversed(self._counts)]
        super().__init__(flat, plan.train, device, ways + back)

    def _pass(self) -> None:
        marks = self._marks
        marks.set()
        entered: Tensors = {}
        passed: List[Tuple[Tensors, Tensors]] = []
        for stage in self._stages:
            left = self._through(stage, entered)
            marks.set()
            passed.append((entered, left))
            entered = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in left.items()}
        gradients: Dict[str, Optional[Tensor]] = {}
        for entered, left in reversed(passed):
            backward(left, gradients)
            gradients = {name: tensor.grad for name, tensor in entered.items()}
            marks.set()

    def _through(self, stage: Stage, entered: Tensors) -> Tensors:
        """What leaves a stage; of the last one, the loss."""
        left = stage({**entered, **{name: self._micro.inputs[name] for name in stage.inputs}})
        return {"loss": self._task.loss(left, self._micro, self._tensor)} if stage.last else left

    def kept_bytes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        entered: Tensors = {}
        for stage, (kind, count) in zip(self._stages, self._counts):
            with Keeping() as kept:
                left = self._through(stage, entered)
            kept.sizes.pop(self._flat.weight.untyped_storage().data_ptr(), None)
            found[kind] = round(sum(kept.sizes.values()) / count)
            entered = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in left.items()}
        return found


def told_medians(found: Dict[str, Median], kept: Dict[str, int]) -> Dict[str, Dict[str, float]]:
    """By part, what a profile tells of it (docs/formats.md)."""
    parts: Dict[str, Dict[str, float]] = {}
    for name, one in found.items():
        part, _, way = name.rpartition(".")
        parts.setdefault(part, {}).update({way: one.value, f"{way}_spread": one.spread})
    for part, size in kept.items():
        parts[part]["activation_bytes"] = size
    return parts


def groups_of(ranks_of_nodes: Sequence[Sequence[int]], size: int) -> List[List[int]]:
    """Tensor groups inside nodes, as many as there are ranks for; what is left over of a node is in none."""
    return [
        list(ranks[first : first + size]) for ranks in ranks_of_nodes for first in range(0, len(ranks) - size + 1, size)
    ]
