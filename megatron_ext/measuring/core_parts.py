"""What the parts of Megatron-Core's model take on a rank, timed as tdpp's own are."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.core.parts import KINDS, ModelParts
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.passes import Passes, SavedTensors, Updates, few_layers
from megatron_ext.parallel.tensor_parallel import TensorGroup


class CoreParts(Passes):
    """One rank's share of megatron.core's model of some layers, and a micro-batch that goes through it again and again.

    The embedding, the layers and the head are chunks of their own, each with megatron.core's sums of gradients around
    it, as stages have them.
    """

    def __init__(
        self, plan: Plan, model: ModelConfig, tensor: TensorGroup, micro_batch_size: int, device: torch.device
    ) -> None:
        """`model` has the vocabulary padded for the tensor size, and `tensor` is megatron.core's group
        (`megatron_ext.core.parts.tensor_group`)."""
        few = few_layers(model)
        self.layers = few.layers
        self._counts = dict(zip(KINDS, (1, few.layers, 1)))
        self._task = task_of(replace(plan, model=few, recompute=Recompute.none))
        self._tensor = tensor
        self._lr = plan.train.lr
        self._parts = ModelParts(plan, few, tensor, self._task)
        source = torch.Generator().manual_seed(plan.train.seed)
        self._micro = self._task.example(micro_batch_size, source).to(device)
        ways = [(f"{kind}.forward", count) for kind, count in self._counts.items()]
        back = [(f"{kind}.backward", count) for kind, count in reversed([*self._counts.items()])]
        super().__init__(device, [*ways, *back])

    def _pass(self) -> None:
        marks = self._marks
        marks.set()
        entered: Optional[Tensor] = None
        passed: List[Tuple[Optional[Tensor], Tensor]] = []
        for stage in range(len(KINDS)):
            left = self._through(stage, entered)
            marks.set()
            passed.append((entered, left))
            entered = left.detach().requires_grad_()
        gradient: Optional[Tensor] = None
        for entered, left in reversed(passed):
            torch.autograd.backward(left, gradient)
            gradient = None if entered is None else entered.grad
            marks.set()

    def _through(self, stage: int, entered: Optional[Tensor]) -> Tensor:
        """What leaves a part; of the last one, the loss."""
        left = self._parts.forward(stage, entered, self._micro.inputs["tokens"] if stage == 0 else None)
        if stage < len(KINDS) - 1:
            return left
        return self._task.loss({"logits": left}, self._micro, self._tensor)

    def kept_bytes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        entered: Optional[Tensor] = None
        for stage, (kind, count) in enumerate(self._counts.items()):
            with SavedTensors() as kept:
                left = self._through(stage, entered)
            sizes = [size for address, size in kept.sizes.items() if not self._parts.are_weights(address)]
            found[kind] = round(sum(sizes) / count)
            entered = left.detach().requires_grad_()
        return found

    def updates(self) -> Updates:
        scale = self._parts.optimizer.scaler.scale
        return Updates(
            lambda: self._parts.fill_gradients(scale * 1e-3),
            lambda: self._parts.update(self._lr),
            self._parts.numel,
        )
