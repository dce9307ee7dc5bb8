"""The modules of an AWD-LSTM language model. All are for a tensor group of one rank.

What is dropped of a sample follows from its number, and is the same at all of its tokens. What is dropped of a layer's
weights follows from the number of the micro-batch's first sample, for all samples of a micro-batch share them.
"""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.parameters import lstm_widths
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from megatron_ext.tasks.linear import WeightGradients, embedding


class LockedDropout:
    """Drops the same numbers of a sample's vectors at every place of the sequence (Gal and Ghahramani 2016)."""

    def __init__(self, rate: float, key: Tensor) -> None:
        self.rate = rate
        self.key = key

    def __call__(self, x: Tensor, number: Tensor, training: bool) -> Tensor:
        """[batch, sequence, width] -> the same; `number` [batch] are the samples' numbers in the run."""
        if not self.rate or not training:
            return x
        return dropout(x, self.rate, rows_of(self.key, number).unsqueeze(1))


class DroppedEmbedding(nn.Module):
    """Vectors of words, of which training drops some words of each sample, wherever they stand, and some numbers."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup, seed: int) -> None:
        super().__init__()
        self.later: Optional[WeightGradients] = None
        self.word_rate = config.embedding_dropout
        self.word_key = key_of(seed, "embedding.word")
        self.dropout = LockedDropout(config.input_dropout, key_of(seed, "embedding"))
        self.word = nn.Parameter(torch.empty(config.padded_vocab_size, config.word_width))

    def forward(self, tokens: Tensor, number: Tensor) -> Tensor:
        """tokens [batch, sequence], number [batch] -> [batch, sequence, width]."""
        x = embedding(tokens, self.word, self.later)
        if self.training and self.word_rate:
            words = rows_of(self.word_key, number, tokens)
            x = x * dropout(x.new_ones(*tokens.shape, 1), self.word_rate, words)
        return self.dropout(x, number, self.training)


class DroppedLayer(nn.Module):
    """An LSTM, of whose weights between steps training drops a part (Wan et al. 2013), and of its result another."""

    def __init__(self, config: ModelConfig, kind: str, tensor: TensorGroup, name: str, seed: int, again: bool) -> None:
        super().__init__()
        self.again = again
        last = kind == "layer_last"
        rate = config.output_dropout if last else config.hidden_dropout
        self.dropout = LockedDropout(rate, key_of(seed, name))
        self.lstm = WeightDroppedLstm(*lstm_widths(config, kind), config.weight_dropout, key_of(seed, f"{name}.lstm"))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[batch, sequence, inputs], number [batch] -> [batch, sequence, outputs]."""
        if not self.again:
            return self._forward(x, number)
        y: Tensor = checkpoint(self._forward, x, number, use_reentrant=False, preserve_rng_state=False)
        return y

    def _forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.dropout(self.lstm(x, number), number, self.training)


class WeightDroppedLstm(nn.Module):
    """One layer of torch's LSTM, under its names."""

    def __init__(self, inputs: int, outputs: int, rate: float, key: Tensor) -> None:
        super().__init__()
        self.rate = rate
        self.key = key
        gates = 4 * outputs
        self.weight_ih_l0 = nn.Parameter(torch.empty(gates, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(gates, outputs))
        self.bias_ih_l0 = nn.Parameter(torch.empty(gates))
        self.bias_hh_l0 = nn.Parameter(torch.empty(gates))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """[batch, sequence, inputs], number [batch] -> [batch, sequence, outputs]."""
        between: Tensor = self.weight_hh_l0
        if self.training and self.rate:
            gates = torch.arange(len(between), device=x.device)
            between = dropout(between, self.rate, rows_of(self.key, number[:1], gates)[0])
        begin = x.new_zeros(1, len(x), between.shape[1])
        weights: List[Tensor] = [self.weight_ih_l0, between, self.bias_ih_l0, self.bias_hh_l0]
        return torch.lstm(x, (begin, begin), weights, True, 1, 0.0, self.training, False, True)[0]
