"""T5: an encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."""

from __future__ import annotations

from typing import Dict

from megatron_ext.contract.models.hf_config import HfConfig, dropouts, unless
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameters
from megatron_ext.contract.models.tokens import TransformerFamily, logits_bias


class _T5(TransformerFamily):
    name = "t5"
    summary = "An encoder and a decoder, which predicts the spans that were cut out of the encoder's tokens."
    model_types = ("t5",)
    masking_ngram = 10
    masking_geometric = True
    megatron_core = True
    metrics = ("loss", "perplexity")
    decoder = True
    options = (*TransformerFamily.options, "decoder_layers", "decoder_sequence_length")

    def beside_logits(self, model: ModelConfig) -> Parameters:
        return {} if model.untie_embeddings_and_output_weights else logits_bias(model)

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        activation = config.given("feed_forward_proj", "relu")
        if activation not in ("relu", "gated-gelu", "gated-silu"):
            raise config.refuse("feed_forward_proj", activation, "tdpp's MLP uses GELU or a gate")
        gated = activation.startswith("gated")
        buckets = config.size("relative_attention_num_buckets", 32)
        config.notes.append(
            f"Unlike Hugging Face's, positions are rotary, not {buckets} relative biases, and the MLP has"
        )
        config.notes.append(
            f"{'a gate of SiLU' if gated else 'GELU'}, not {activation}. Checkpoints cannot be exchanged."
        )
        hidden, heads, width = config.size("d_model"), config.size("num_heads"), config.size("d_kv", 64)
        layers, dropout = config.size("num_layers"), config.number("dropout_rate", 0.1)
        decoder = config.size("num_decoder_layers", layers)
        return {
            "layers": layers,
            **unless({"decoder_layers": decoder}, decoder_layers=layers),
            "hidden": hidden,
            "heads": heads,
            **({} if width * heads == hidden else {"kv_channels": width}),
            "ffn_hidden": config.size("d_ff"),
            "sequence_length": config.length(config.size("n_positions", 512), bounded=False),
            "vocab_size": config.size("vocab_size"),
            "normalization": "RMSNorm",
            "norm_epsilon": config.number("layer_norm_epsilon", 1e-6),
            "position_embedding_type": "rope",
            **({"swiglu": True} if gated else {}),
            "add_bias_linear": False,
            **config.untied(True),
            **dropouts(dropout, dropout),
        }


FAMILY = _T5()
