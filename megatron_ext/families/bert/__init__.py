"""BERT: encoders that predict masked tokens and, with a binary head, whether two sentences follow each other."""

from __future__ import annotations

from megatron_ext.contract.models.model import TOKEN_TYPES, ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters
from megatron_ext.contract.models.tokens import TransformerFamily, logits_bias, norm


class _Bert(TransformerFamily):
    name = "bert"
    summary = "An encoder that predicts masked tokens, and whether two sentences follow each other."
    order = 2
    masking_ngram = 3
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


FAMILY = _Bert()
