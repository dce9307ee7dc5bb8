"""T5: an encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."""

from __future__ import annotations

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameters
from megatron_ext.contract.models.tokens import TransformerFamily, logits_bias


class _T5(TransformerFamily):
    name = "t5"
    summary = "An encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."
    order = 3
    masking_ngram = 10
    masking_geometric = True
    metrics = ("loss", "perplexity")
    decoder = True
    options = (*TransformerFamily.options, "decoder_layers", "decoder_sequence_length")

    def beside_logits(self, model: ModelConfig) -> Parameters:
        return {} if model.untie_embeddings_and_output_weights else logits_bias(model)


FAMILY = _T5()
