"""The head of a model of LSTMs. For a tensor group of one rank."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.linear import WeightGradients, linear


class Logits(nn.Module):
    """A matrix and a bias for the vocabulary."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup) -> None:
        super().__init__()
        self.later: Optional[WeightGradients] = None
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size, config.head_inputs))
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, inputs] -> logits [batch, sequence, padded vocabulary]."""
        return linear(x, self.word, self.bias, self.later)
