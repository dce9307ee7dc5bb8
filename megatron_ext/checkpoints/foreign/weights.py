"""Weights of a GPT that another program saved: Hugging Face's transformers, or Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Union

from megatron_ext.checkpoints.foreign import hf_weights, megatron_names
from megatron_ext.checkpoints.foreign.torch_dist import is_torch_dist
from megatron_ext.contract.models.model import ModelConfig

Weights = Union[hf_weights.Weights, megatron_names.Weights]


def weights_at(path: Path, model: ModelConfig) -> Weights:
    """What is at `path`, by its headers or its index; no torch is needed until its tensors are read.

    Files of Megatron-Core do not say what model they are of, so its sizes alone are compared with those of `model`.
    Those of Hugging Face do, so theirs may be another one.

    Raises:
        EngineError: there is no such model, or its files do not fit together.
    """
    if is_torch_dist(path):
        return megatron_names.Weights(path, model)
    return hf_weights.Weights(path, model.heads, model.sequence_length)
