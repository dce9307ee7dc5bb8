"""Adam with decoupled weight decay, gradient clipping over all ranks, and the learning rate's schedule."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.contract.plan import TrainConfig
from megatron_ext.engine.flat import FlatWeights
from megatron_ext.engine.precision import LossScaler
from megatron_ext.parallel.comm import all_gather, all_reduce
from megatron_ext.timeline.progress import Wait
from megatron_ext.timeline.recorder import Recorder

NORM_ROW = 1024
"""Squares that are summed in fp32: few enough for an error far below that of the gradients themselves."""


def learning_rate(updates: int, train: TrainConfig) -> float:
    """Linear warm-up from 0, then a cosine down to `min_lr`: what Megatron's scheduler has after `updates`."""
    if train.lr_warmup_iterations > 0 and updates <= train.lr_warmup_iterations:
        return train.lr * updates / train.lr_warmup_iterations
    if updates >= train.lr_decay_iterations:
        return train.min_lr
    done = (updates - train.lr_warmup_iterations) / (train.lr_decay_iterations - train.lr_warmup_iterations)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (math.cos(math.pi * done) + 1.0)


class DataGroup(NamedTuple):
    """A rank's data-parallel group: its size, and this rank's number in it."""

    size: int
    rank: int
    group: Optional[dist.ProcessGroup]


class Optimizer:
    """Steps the flat weights of one rank; all ranks call it together.

    With a sharded optimizer a replica keeps fp32 weights and Adam's moments of its share only, and the replicas
    hand each other their updated weights (Rajbhandari et al. 2020, stage 1).
    """

    def __init__(
        self,
        flat: FlatWeights,
        train: TrainConfig,
        model: Optional[dist.ProcessGroup],
        data: DataGroup,
        sharded: bool,
        counted_elsewhere: List[Tensor],
    ) -> None:
        """`model` is the group of all ranks of this replica.

        `counted_elsewhere` are gradients, part of the flat one, of weights of which another rank of that group has
        a copy, and counts it in the norm.
        """
        self._flat = flat
        self._train = train
        self._model = model
        self._data = data if sharded else DataGroup(1, 0, None)
        self._counted_elsewhere = counted_elsewhere
        self._own = self._share(self._data.rank)
        self._is_weight = flat.weight.dtype == torch.float32 and not sharded
        """Whether the optimizer steps the model's weights themselves, not a copy in fp32."""
        self._master = nn.Parameter(
            flat.weight if self._is_weight else flat.initial[self._own].to(flat.weight.device, copy=True)
        )
        self._master.grad = flat.grad[self._own]
        flat.initial = torch.empty(0)
        # Biases and norms do not decay; Adam itself is given none, so that its state stays one flat tensor.
        self._decaying = [
            self._master.data[max(here.start, self._own.start) - self._own.start : here.stop - self._own.start]
            for name, here in flat.slices.items()
            if flat.parameters[name].dim() > 1 and here.start < self._own.stop and here.stop > self._own.start
        ]
        self._adam = torch.optim.Adam(
            [self._master],
            lr=0.0,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            fused=flat.weight.is_cuda or torch.__version__ >= "2.4",  # before, it knew no CPU
        )
        self.scaler = LossScaler.of(train.precision)
        self.updates = 0
        """Updates made so far; skipped iterations make none."""

    def step(self, recorder: Recorder) -> float:
        """Clips, updates and zeroes the gradients, which carry the loss scale.

        Returns the norm of the whole model's gradient before clipping. If it is not finite nothing is updated.
        """
        scale = self.scaler.scale
        with recorder.span("optimizer"):
            with recorder.span("optimizer-clip-main-grad"):
                norm = self._norm(recorder) / scale
                clip = self._train.clip_grad
                factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
                if factor != scale and math.isfinite(norm):
                    self._flat.grad[self._own].mul_(factor / scale)
            if math.isfinite(norm):
                self._update(recorder)
                self.updates += 1
            self.scaler.update(math.isfinite(norm))
            self._flat.grad.zero_()
        return norm

    def state(self) -> Dict[str, Tensor]:
        """Weights and Adam's moments of all parameters of the rank in fp32, laid out as the flat weights.

        All replicas call it together.
        """
        moments = self._adam.state.get(self._master, {})
        nothing = torch.zeros_like(self._master.data)
        own = {
            "weights": self._master.data,
            "adam_m": moments.get("exp_avg", nothing),
            "adam_v": moments.get("exp_avg_sq", nothing),
        }
        if self._data.size == 1:
            return own
        state = {kind: torch.empty_like(self._flat.grad) for kind in own}
        for kind, share in own.items():
            self._gather(share, state[kind])
        return state

    def load(self, state: Dict[str, Tensor], updates: int) -> None:
        """Takes over what `state` gave, in this or another layout."""
        self._master.data.copy_(state["weights"][self._own])
        self._adam.state[self._master] = {
            "step": torch.tensor(float(updates), device=self._master.device if self._flat.weight.is_cuda else "cpu"),
            # Copies on a CPU, too: a view would keep what the other replicas have of them in memory.
            "exp_avg": state["adam_m"][self._own].to(self._master, copy=True),
            "exp_avg_sq": state["adam_v"][self._own].to(self._master, copy=True),
        }
        self.updates = updates
        self._hand_out(Recorder(None))

    def _update(self, recorder: Recorder) -> None:
        if self._master.numel():
            lr = learning_rate(self.updates, self._train)
            for weight in self._decaying:
                weight.mul_(1.0 - lr * self._train.weight_decay)
            self._adam.param_groups[0]["lr"] = lr
            self._adam.step()
        self._hand_out(recorder)

    def _hand_out(self, recorder: Recorder) -> None:
        """Gives the model the updated weights: this rank's own, and from the others theirs."""
        if self._is_weight:
            return
        own = self._flat.weight[self._own]
        own.copy_(self._master.data)
        if self._data.size > 1:
            with recorder.span("params-all-gather"):
                self._gather(own, self._flat.weight)

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        """Lays the shares of all replicas out in `whole`, one after another."""
        shares = whole.view(self._data.size, own.numel())
        all_gather(own, shares, self._data.group, "all-gather of the sharded optimizer")

    def _share(self, rank: int) -> slice:
        """The slice of the flat weights that a replica steps."""
        length, rest = divmod(self._flat.weight.numel(), self._data.size)
        assert rest == 0, "the flat weights cannot be shared out evenly"
        return slice(length * rank, length * (rank + 1))

    def _norm(self, recorder: Recorder) -> float:
        """Norm over the whole model; replicas hold equal gradients, and each weight counts once."""
        square = _square_norm(self._flat.grad)
        for gradient in self._counted_elsewhere:
            square -= _square_norm(gradient.flatten())
        if self._model is not None:
            with recorder.span("grad-norm-all-reduce"):
                all_reduce(square, self._model, "all-reduce of the gradient norm")
        with Wait("reading the gradient norm"):
            return float(square.clamp(min=0.0).sqrt())


def _square_norm(flat: Tensor) -> Tensor:
    """The sum of a vector's squares, fp64, from the norms of short rows: torch copies into fp64 all that it is to sum
    in fp64, and so would take twice the gradients' memory, and 30 times as long.
    """
    whole = len(flat) // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    square: Tensor = rows.double().square().sum() + rest.double().square()
    return square
