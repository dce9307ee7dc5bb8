"""Batch norms that every layout trains alike: the unit of their statistics is the micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.tasks.running import Running

MOMENTUM = 0.1
"""Of an iteration's mean in the running statistics."""


class BatchNorm(Running):
    """Over [batch, channels, height, width] (Ioffe and Szegedy 2015)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("gathered", torch.zeros(2 * width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; in training by the micro-batch's own statistics, else by the running ones."""
        weight, bias = self.weight.float(), self.bias.float()
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.epsilon)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=self.epsilon)
        with torch.no_grad():
            self.gathered += torch.cat([mean, var])
        return y

    def update(self, mean: Tensor) -> None:
        """[2 x channels]: of the means and of the variances."""
        for running, found in zip((self.running_mean, self.running_var), mean.chunk(2)):
            running.lerp_(found, MOMENTUM)
