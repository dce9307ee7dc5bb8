"""The transformer of Vaswani et al. 2017, which translates sentences."""

from __future__ import annotations

from typing import Dict

from megatron_ext.contract.goal import OF_TRANSLATION
from megatron_ext.contract.models.keys import SINUSOIDAL
from megatron_ext.contract.models.model import PAIRS, ModelConfig
from megatron_ext.contract.models.tokens import TransformerFamily


class _Transformer(TransformerFamily):
    name = "transformer"
    summary = "An encoder and a decoder of attention, which translates sentences (docs/translation.md)."
    learns = PAIRS
    metrics = OF_TRANSLATION
    decoder = True
    positions = (SINUSOIDAL,)
    attention_bias = False
    relu = True
    options = (*TransformerFamily.options, "decoder_layers", "decoder_sequence_length", "label_smoothing")

    def tied(self, model: ModelConfig) -> Dict[str, str]:
        return {} if model.untie_embeddings_and_output_weights else super().tied(model)


FAMILY = _Transformer()
