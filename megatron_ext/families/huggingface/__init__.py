"""Causal models of Hugging Face's transformers, made of its own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, Tuple

from megatron_ext.contract.files import read_regular_text, why
from megatron_ext.contract.models.hf_config import HfConfig, HfConfigError, config_file
from megatron_ext.contract.models.model import Family, ModelConfig
from megatron_ext.contract.models.pieces import Stack

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "sequence_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    "vocab_size": ("vocab_size",),
}
"""What families call the keys of `model`."""
WITHOUT = {"heads": 1}
"""Sizes that a model may lack: one of state spaces has no attention."""


class _HuggingFace(Family):
    name = "huggingface"
    summary = "A causal model of Hugging Face's transformers, from its config.json (docs/models.md)."
    running_text = True
    packs = True
    metrics = ("loss", "perplexity")
    measured = True
    shares_layers = True
    published = True
    adapters = True
    options = ("config", "code_digest")
    needs = ("config",)

    def stacks(self, model: ModelConfig) -> Tuple[Stack, ...]:
        return (Stack("layer", "layers", model.layers, model.sequence_length, causal=True),)

    def all_kinds(self, model: ModelConfig) -> Tuple[Tuple[str, int], ...]:
        return (("embedding", 1), *model.kinds(), ("head", 1))

    def sizes_of(self, config: str) -> Dict[str, int]:
        path = config_file(config)
        try:
            content = json.loads(read_regular_text(Path(path)))
        except OSError as error:
            raise HfConfigError(
                f"{path} cannot be read: {error.strerror}; give a config.json, or the folder that has it"
            ) from error
        except (ValueError, RecursionError) as error:
            raise HfConfigError(f"{path} is not JSON ({why(error)}); give the config.json of a model") from error
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise HfConfigError(f"{path} has no model_type; give the config.json of a model of transformers")
        return _sizes(HfConfig(path, content))

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        found = _sizes(config)
        for key, (name, *_) in NAMES.items():
            if key not in found:
                config.given(name)
        return {**found}


def _sizes(config: HfConfig) -> Dict[str, int]:
    """Those that a file gives."""
    found = {**WITHOUT}
    for key, names in NAMES.items():
        name = next((name for name in names if config.content.get(name) is not None), None)
        if name is not None:
            found[key] = config.size(name)
    if config.sequence_length is not None:
        found["sequence_length"] = config.sequence_length
    return found


FAMILY = _HuggingFace()
