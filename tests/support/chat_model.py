"""A tiny model as people publish them: weights, a tokenizer with a chat template, and conversations to learn."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

BEGIN, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = CHATML) -> Any:
    """Of bytes, with ChatML's template; returns transformers' own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["user assistant system"], trainers.BpeTrainer(
        vocab_size=280, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
    ))  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder: Path, kind: str = "qwen3", length: int = 64, tied: bool = False) -> Any:
    """With its tokenizer; returns transformers' own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=length,
        tie_word_embeddings=tied, pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


def sums(most: int = 10) -> list[list[dict[str, str]]]:
    """Conversations about sums of one digit."""
    return [
        [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a in range(most)
        for b in range(most)
    ]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return path
