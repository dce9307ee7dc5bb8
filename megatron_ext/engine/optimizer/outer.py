"""The outer optimizer of islands, which learns from how far they have moved their weights (DiLoCo).

Douillard et al. 2023, arXiv 2311.08105, algorithm 1: the pseudo-gradient is the weights before minus the islands' mean
after some iterations of their own, and Nesterov's momentum steps along it. A rate of 1 without momentum takes the mean.
"""

from __future__ import annotations

from typing import Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.run_files import OUTER, WEIGHTS
from megatron_ext.contract.train_config import TrainConfig


class OuterOptimizer:
    """SGD as torch has it, with Nesterov's momentum, on the weights that all islands have in common, fp32."""

    def __init__(self, weights: Tensor, train: TrainConfig) -> None:
        """`weights` are the initial ones, which are copied."""
        self.weights = weights.clone()
        """After its last step."""
        self._lr, self._beta = train.outer_lr, train.outer_momentum
        self._momentum: Optional[Tensor] = torch.zeros_like(weights) if self._beta else None

    @property
    def kinds(self) -> Tuple[str, ...]:
        """Kinds of its state in checkpoints, beside the weights."""
        return () if self._momentum is None else (OUTER,)

    def step(self, mean: Tensor) -> None:
        """Updates the weights from the islands' `mean`, in whose place it works."""
        moved = torch.sub(self.weights, mean, out=mean)
        if self._momentum is not None:
            self._momentum.mul_(self._beta).add_(moved)
            moved.add_(self._momentum, alpha=self._beta)
        self.weights.sub_(moved, alpha=self._lr)

    def state(self) -> Dict[str, Tensor]:
        """Return its state by kind, laid out as the weights."""
        return {WEIGHTS: self.weights, **({} if self._momentum is None else {OUTER: self._momentum})}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave."""
        for kind, own in self.state().items():
            own.copy_(state[kind])
