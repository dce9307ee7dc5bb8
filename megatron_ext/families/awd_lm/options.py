"""What only an AWD-LSTM drops in training (Merity et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.contract.keys import FRACTION, option


@dataclass(frozen=True)
class AwdLmOptions:
    embedding_dropout: float = option(0.0, FRACTION)
    """For awd_lm: the fraction of words whose vectors are 0 throughout a sample."""
    input_dropout: float = option(0.0, FRACTION)
    """For awd_lm: dropout of the first layer's input."""
    output_dropout: float = option(0.0, FRACTION)
    """For awd_lm: dropout of the last layer's output."""
    weight_dropout: float = option(0.0, FRACTION)
    """For awd_lm: the fraction of recurrent weights that is 0 throughout a micro-batch."""


OPTIONS = AwdLmOptions
