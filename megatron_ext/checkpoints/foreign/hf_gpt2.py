"""Hugging Face's GPT-2: how its tensors are called, and its config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from megatron_ext.checkpoints.foreign.hf_files import Twin, taken
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.model import OPTIONS, ModelConfig

PREFIX = "transformer."
"""How names begin in a model with a head; the published files are without it."""
END_OF_TEXT = 50256

_EMBEDDING = {"word": Twin(("wte.weight",)), "position": Twin(("wpe.weight",))}
_HEAD = {"norm.weight": Twin(("ln_f.weight",)), "norm.bias": Twin(("ln_f.bias",))}
_LAYER = {
    f"{ours}.{kind}": Twin((f"{theirs}.{kind}",), transposed=kind == "weight" and not ours.endswith("norm"))
    for ours, theirs in (
        *(("attention_norm", "ln_1"), ("qkv", "attn.c_attn"), ("attention_out", "attn.c_proj")),
        *(("mlp_norm", "ln_2"), ("mlp_in", "mlp.c_fc"), ("mlp_out", "mlp.c_proj")),
    )
    for kind in ("weight", "bias")
}
_FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
"""Keys of config.json in which every model here is the same; all but the first have these values if absent."""


def fits(model: ModelConfig) -> bool:
    """Whether GPT-2's layout can hold it."""
    return not set(model.identity()) & OPTIONS.keys()


def twins(model: ModelConfig, part: str) -> Dict[str, Twin]:
    """The parameters of a part of a checkpoint."""
    if part.startswith("layer-"):
        return {ours: twin.within(f"h.{int(part[len('layer-') :])}.") for ours, twin in _LAYER.items()}
    return _EMBEDDING if part == "embedding" else _HEAD


def config_of(model: ModelConfig) -> Dict[str, Any]:
    """config.json of a model; no dropout, as it was trained."""
    # GPT-2's end of text is what a reader assumes, but a smaller vocabulary has no such token.
    ends = {} if model.vocab_size > END_OF_TEXT else {"bos_token_id": None, "eos_token_id": None}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_positions": model.sequence_length,
        "vocab_size": model.vocab_size,
        **ends,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def model_of(path: Path, found: Mapping[str, Any], config: Dict[str, Any], heads: Optional[int]) -> ModelConfig:
    """The model, as its tensors and its config.json, if there is one, agree on it. Raises EngineError: they do not
    agree, or the engine does not compute such a model."""
    _check(path.parent / "config.json", config)
    word, position = (taken(path, found, twin.names[0]) for twin in _EMBEDDING.values())
    numbers = [int(name.split(".")[1]) for name in found if re.match(r"h\.\d+\.", name)]
    sizes = {
        "n_layer": max(numbers, default=-1) + 1,
        "n_embd": word.shape[-1],
        "n_positions": position.shape[0],
        "vocab_size": word.shape[0],
    }
    for key, size in sizes.items():
        if config.get(key, size) != size:
            raise EngineError(f"{path}: its tensors have {key}={size}, but config.json has {key}={config[key]!r}")
    if heads is None:
        heads = config.get("n_head")
    if heads is None:
        raise EngineError(f"{path}: no config.json beside it with n_head: give the number of heads with --heads")
    if not isinstance(heads, int) or heads < 1 or sizes["n_embd"] % heads:
        raise EngineError(f"{path}: {heads!r} attention heads do not divide the hidden size {sizes['n_embd']}")
    return ModelConfig(
        layers=sizes["n_layer"],
        hidden=sizes["n_embd"],
        heads=heads,
        sequence_length=sizes["n_positions"],
        vocab_size=sizes["vocab_size"],
        padded_vocab_size=sizes["vocab_size"],
    )


def require_tied(path: Path, found: Mapping[str, Any]) -> None:
    """Raises EngineError if the head has a matrix of its own."""
    if "lm_head.weight" in found and not found["lm_head.weight"].equal(found["wte.weight"]):
        raise EngineError(f"{path}: its lm_head.weight is not its embedding, but the engine's models tie them")


def without_prefix(path: Path, tensors: Mapping[str, Any]) -> Dict[str, Any]:
    """What is there by the names that published files have. Raises EngineError: a tensor is there by both of its
    names."""
    found: Dict[str, Any] = {}
    for name, tensor in tensors.items():
        plain = name[len(PREFIX) :] if name.startswith(PREFIX) else name
        if plain in found:
            raise EngineError(f"{path}: the tensor {plain} is there twice, with {PREFIX!r} before its name and without")
        found[plain] = tensor
    return found


def _check(path: Path, config: Dict[str, Any]) -> None:
    """Whether the engine computes such a GPT-2."""
    if not config:
        return
    inner = config.get("n_inner")
    if inner is not None and inner != 4 * config.get("n_embd", 0):
        raise EngineError(f"{path}: n_inner={inner}, but the engine's models have 4 x n_embd")
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise EngineError(f"{path}: expected {key}={value!r}, found {config.get(key)!r}")
