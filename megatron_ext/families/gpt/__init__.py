"""GPT-2 and Llama: decoders that predict the next token."""

from __future__ import annotations

from megatron_ext.contract.models.tokens import TransformerFamily


class _Gpt(TransformerFamily):
    name = "gpt"
    summary = "A decoder that predicts the next token; with Llama's options, a Llama."
    order = 1
    running_text = True
    metrics = ("loss", "perplexity")
    megatron_lm = True


FAMILY = _Gpt()
