"""Adam with decoupled weight decay, gradient clipping over all ranks, and the learning rate's schedule."""

from __future__ import annotations

import math
from typing import List, Optional

import torch
import torch.distributed as dist
from torch import nn

from megatron_ext.comm import all_reduce
from megatron_ext.flat import FlatWeights
from megatron_ext.plan import TrainConfig
from megatron_ext.timeline import Recorder


def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up from 0, then a cosine down to `min_lr`, as Megatron's scheduler has it after `step` updates."""
    if train.lr_warmup_iterations > 0 and step <= train.lr_warmup_iterations:
        return train.lr * step / train.lr_warmup_iterations
    if step >= train.lr_decay_iterations:
        return train.min_lr
    done = (step - train.lr_warmup_iterations) / (train.lr_decay_iterations - train.lr_warmup_iterations)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (math.cos(math.pi * done) + 1.0)


class Optimizer:
    """Steps the flat weights of one stage; all replicas and stages call it together."""

    def __init__(
        self,
        flat: FlatWeights,
        train: TrainConfig,
        model: Optional[dist.ProcessGroup],
        counted_elsewhere: List[nn.Parameter],
    ) -> None:
        """`model` is the group of all ranks of this replica.

        `counted_elsewhere` are those of this rank's weights of which another rank of the group has a copy, and
        counts it in the norm.
        """
        self._flat = flat
        self._train = train
        self._model = model
        self._counted_elsewhere = counted_elsewhere
        # Biases and norms do not decay; Adam itself is given none, so that its state stays one flat tensor.
        self._decaying = [p.data for p in flat.parameters.values() if p.dim() > 1]
        self.adam = torch.optim.Adam(
            [flat.weight], lr=0.0, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps
        )

    def step(self, updates_before: int, recorder: Recorder) -> float:
        """Clips and updates, with the learning rate that follows `updates_before` updates; zeroes the gradients.

        Returns the norm of the whole model's gradient before clipping, which is not finite if a gradient is
        not; then nothing is updated.
        """
        with recorder.span("optimizer"):
            with recorder.span("optimizer-clip-main-grad"):
                norm = self._norm()
                if self._train.clip_grad and norm > self._train.clip_grad:
                    self._flat.grad.mul_(self._train.clip_grad / (norm + 1e-6))
            if math.isfinite(norm) and self._flat.weight.numel():
                lr = learning_rate(updates_before, self._train)
                for weight in self._decaying:
                    weight.mul_(1.0 - lr * self._train.weight_decay)
                self.adam.param_groups[0]["lr"] = lr
                self.adam.step()
            self._flat.grad.zero_()
        return norm

    def _norm(self) -> float:
        """Norm over the whole model; replicas hold equal gradients, and each weight counts once."""
        square = torch.linalg.vector_norm(self._flat.grad, dtype=torch.float64).square()
        for weight in self._counted_elsewhere:
            assert weight.grad is not None
            square -= torch.linalg.vector_norm(weight.grad, dtype=torch.float64).square()
        all_reduce(square, self._model, "all-reduce of the gradient norm")
        return float(square.clamp(min=0.0).sqrt())
