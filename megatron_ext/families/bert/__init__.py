"""BERT: encoders that predict masked tokens and, with a binary head, whether two sentences follow each other."""

from __future__ import annotations

from typing import Dict

from megatron_ext.contract.models.hf_config import TANH_GELU, HfConfig
from megatron_ext.contract.models.model import TOKEN_TYPES, ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters
from megatron_ext.contract.models.tokens import TransformerFamily, logits_bias, norm


class _Bert(TransformerFamily):
    name = "bert"
    summary = "An encoder that predicts masked tokens, and whether two sentences follow each other."
    model_types = ("bert",)
    masking_ngram = 3
    megatron_core = True
    metrics = ("loss",)
    options = (*TransformerFamily.options, "bert_binary_head")

    def added_embeddings(self, model: ModelConfig) -> Parameters:
        found = super().added_embeddings(model)
        if model.bert_binary_head:
            found["types"] = Parameter((TOKEN_TYPES, model.hidden))
        return found

    def before_logits(self, model: ModelConfig) -> Parameters:
        dense = {"dense.weight": Parameter((model.hidden, model.hidden)), "dense.bias": Parameter((model.hidden,))}
        return {**dense, **norm(model, "dense_norm")}

    def beside_logits(self, model: ModelConfig) -> Parameters:
        found = logits_bias(model)
        if model.bert_binary_head:
            found["pooler.weight"] = Parameter((model.hidden, model.hidden))
            found["pooler.bias"] = Parameter((model.hidden,))
            found["binary.weight"] = Parameter((2, model.hidden))
            found["binary.bias"] = Parameter((2,))
        return found

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        config.must("hidden_act", ("gelu", *TANH_GELU), "an MLP here has GELU")
        config.must("position_embedding_type", "absolute", "tdpp's BERT uses learned positions")
        config.must("type_vocab_size", 2, "tdpp's BERT has two token types")
        config.must("is_decoder", False, "tdpp's BERT is an encoder")
        config.notes.append("As in Megatron-LM, norms come before attention and MLP (in Hugging Face's after them),")
        config.notes.append("and GELU uses tanh. Sizes and parameters are the same; checkpoints cannot be exchanged.")
        return {
            **config.encoder(),
            "sequence_length": config.length(config.size("max_position_embeddings", 512)),
            "vocab_size": config.size("vocab_size"),
            **config.untied(True),
        }


FAMILY = _Bert()
