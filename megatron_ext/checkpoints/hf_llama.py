"""Hugging Face's Llama: how its tensors are called, and its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

from torch import Tensor

from megatron_ext.checkpoints.hf_files import Twin
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.keys import RMS_NORM, ROTARY
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_check import PlanFault, check_object
from megatron_ext.families.gpt.options import GptOptions

_LAYER = {
    "attention_norm.weight": Twin(("input_layernorm.weight",)),
    "mlp_norm.weight": Twin(("post_attention_layernorm.weight",)),
    **{
        f"{ours}.{kind}": Twin(tuple(f"{name}.{kind}" for name in names))
        for kind in ("weight", "bias")
        for ours, names in {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention_out": ("self_attn.o_proj",),
            "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp_out": ("mlp.down_proj",),
        }.items()
    },
}
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3's rotary embedding, as the engine computes it."""


def fits(model: ModelConfig) -> bool:
    """Whether Llama's layout can hold it."""
    return (
        model.traits.megatron_lm
        and model.normalization == RMS_NORM
        and model.position_embedding_type == ROTARY
        and model.swiglu
        and model.own(GptOptions).experts is None
    )


def twins(model: ModelConfig, part: str) -> Dict[str, Twin]:
    """The parameters of a part of a checkpoint."""
    if part == "embedding":
        return {"word": Twin(("model.embed_tokens.weight",))}
    if part == "head":
        own = {"word": Twin(("lm_head.weight",))} if model.untie_embeddings_and_output_weights else {}
        return {"norm.weight": Twin(("model.norm.weight",)), **own}
    names = model.traits.parameters(model, "layer")
    return {ours: _LAYER[ours].within(f"model.layers.{int(part[len('layer-') :])}.") for ours in names}


def config_of(model: ModelConfig) -> Dict[str, Any]:
    """config.json of a model."""
    factor = model.rope_scaling_factor
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_width,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": None if factor is None else {"rope_type": "llama3", "factor": factor, **_SCALING},
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def model_of(path: Path, found: Dict[str, Tensor], config: Dict[str, Any], sequence: Optional[int]) -> ModelConfig:
    """The model that config.json describes, for sequences of this length, or of the longest that it allows.

    Raises:
        EngineError: a key is missing or wrong, or the engine does not compute such a model.
    """
    path = path.parent / "config.json"
    rope = config.get("rope_parameters") or {}  # where transformers 5 keeps both
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else {})
    bias = config.get("attention_bias", False)
    for key, value in {"hidden_act": "silu", "mlp_bias": bias, "pretraining_tp": 1}.items():
        if config.get(key, value if key != "mlp_bias" else False) != value:
            raise EngineError(f"{path}: expected {key}={value!r}, found {config.get(key)!r}")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    width = config.get("head_dim")
    own_width = isinstance(width, int) and isinstance(heads, int) and width * heads != hidden
    content = {
        "layers": config.get("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "sequence_length": config.get("max_position_embeddings", 2048) if sequence is None else sequence,
        "vocab_size": config.get("vocab_size"),
        "padded_vocab_size": config.get("vocab_size"),
        "ffn_hidden": config.get("intermediate_size"),
        "num_query_groups": config.get("num_key_value_heads") if config.get("num_key_value_heads") != heads else None,
        "kv_channels": width if own_width else None,
        "normalization": RMS_NORM,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "position_embedding_type": ROTARY,
        "rotary_base": float(config.get("rope_theta", rope.get("rope_theta", 10000.0))),
        "rope_scaling_factor": _factor(path, scaling),
        "swiglu": True,
        "add_bias_linear": bias,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
    }
    try:
        check_object(ModelConfig, content, "model", whole=True)
    except PlanFault as error:
        raise EngineError(f"{path}: not a Llama that the engine computes: {error}") from error
    model = ModelConfig(**content)
    if (model.kv_channels is None and model.hidden % model.heads) or model.heads % model.query_groups:
        raise EngineError(
            f"{path}: num_attention_heads={model.heads} must divide hidden_size={model.hidden}, and be a multiple of "
            f"num_key_value_heads={model.query_groups}"
        )
    return model


def _factor(path: Path, scaling: Dict[str, Any]) -> Optional[float]:
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    other = [key for key, value in _SCALING.items() if scaling.get(key, value) != value]
    if kind != "llama3" or other:
        expected = ", ".join(f"{key}={_SCALING[key]}" for key in other) or "rope_type='llama3'"
        found = ", ".join(f"{key}={scaling[key]!r}" for key in other) or f"{kind!r}"
        raise EngineError(
            f"{path}: the engine's scaled rotary embedding is Llama 3's: expected {expected}, found {found}"
        )
    return float(scaling["factor"])
