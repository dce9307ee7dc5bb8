"""How Hugging Face's Llama, Mistral, Mixtral, Qwen 2 and 3, StableLM and Gemma 2 and 3 call their tensors, and their
config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_ext.checkpoints.foreign.hf_files import Twin
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.hf_config import HfConfig
from megatron_ext.contract.models.keys import DEFAULT, RMS_NORM, ROTARY
from megatron_ext.contract.models.model import ModelConfig, family_named
from megatron_ext.contract.plan_check import PlanFault, build, check_object
from megatron_ext.families.gpt import FULL, GEMMA2, GEMMA3, GEMMAS, LLAMA3, SLIDING, STABLELM
from megatron_ext.families.gpt.options import GptOptions, slides

_LAYER = {
    **{f"attention_norm.{kind}": Twin((f"input_layernorm.{kind}",)) for kind in ("weight", "bias")},
    **{f"mlp_norm.{kind}": Twin((f"post_attention_layernorm.{kind}",)) for kind in ("weight", "bias")},
    "query_norm.weight": Twin(("self_attn.q_norm.weight",)),
    "key_norm.weight": Twin(("self_attn.k_norm.weight",)),
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
_GEMMA = {
    **_LAYER,
    "attention_norm.weight": Twin(("input_layernorm.weight",), less=1.0),
    "attention_post_norm.weight": Twin(("post_attention_layernorm.weight",), less=1.0),
    "mlp_norm.weight": Twin(("pre_feedforward_layernorm.weight",), less=1.0),
    "mlp_post_norm.weight": Twin(("post_feedforward_layernorm.weight",), less=1.0),
    "query_norm.weight": Twin(("self_attn.q_norm.weight",), less=1.0),
    "key_norm.weight": Twin(("self_attn.k_norm.weight",), less=1.0),
}
"""Whose norms multiply by 1 + w, and keep w."""
_ROUTER = Twin(("block_sparse_moe.gate.weight",))
_EXPERT = {"mlp_in.weight": ("w1.weight", "w3.weight"), "mlp_out.weight": ("w2.weight",)}
"""Where an expert's parameters are in a Mixtral."""
MIXTRAL = "mixtral"
_CLASSES = {
    MIXTRAL: "MixtralForCausalLM",
    **{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    **{GEMMA2: "Gemma2ForCausalLM", GEMMA3: "Gemma3ForCausalLM"},
    **{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", STABLELM: "StableLmForCausalLM"},
}


def fits(model: ModelConfig) -> bool:
    """Whether the layout of a Llama or of another model of this module can hold it."""
    return (
        model.traits.megatron_lm
        and model.position_embedding_type == ROTARY
        and model.swiglu
        and _kind(model) is not None
    )


def _kind(model: ModelConfig) -> Optional[str]:
    """The `model_type` that computes it; None: there is none."""
    own, biases = model.own(GptOptions), model.add_bias_linear
    if own.post_norms or own.scale_embedding or own.geglu:
        return _gemma_kind(model)
    if any(one is not None for one in (own.attention_softcap, own.logits_softcap, own.query_scalar)):
        return None
    if own.sliding_rotary_base is not None:
        return None
    if model.normalization != RMS_NORM:
        others = own.experts is not None or own.qk_layernorm or own.sliding_window is not None
        return None if biases or others or model.head_width * model.heads != model.hidden else STABLELM
    if model.rotary_percent != 1.0:
        return None
    if own.experts is not None:
        others = own.qk_layernorm or own.add_qkv_bias or own.sliding_window is not None
        return None if biases or others or model.rope_scaling_factor is not None else MIXTRAL
    if own.qk_layernorm or own.add_qkv_bias:
        several = own.qk_layernorm and own.add_qkv_bias
        return None if biases or several else "qwen3" if own.qk_layernorm else "qwen2"
    if own.sliding_window is None:
        return "llama"
    return None if biases or own.full_attention_every is not None else "mistral"


def _gemma_kind(model: ModelConfig) -> Optional[str]:
    own = model.own(GptOptions)
    others = model.add_bias_linear or own.add_qkv_bias or own.experts is not None or model.rotary_percent != 1.0
    scaled = model.rope_scaling_factor is not None or model.normalization != RMS_NORM
    if others or scaled or not (own.post_norms and own.scale_embedding and own.geglu):
        return None
    return GEMMA3 if own.qk_layernorm else GEMMA2 if own.sliding_rotary_base is None else None


def twins(model: ModelConfig, part: str) -> Dict[str, Twin]:
    """The parameters of a part of a checkpoint."""
    if part == "embedding":
        return {"word": Twin(("model.embed_tokens.weight",))}
    if part == "head":
        own = {"word": Twin(("lm_head.weight",))} if model.untie_embeddings_and_output_weights else {}
        norms = [name for name in model.traits.parameters(model, "head") if name.startswith("norm.")]
        less = 1.0 if _kind(model) in GEMMAS else 0.0
        return {**{name: Twin((f"model.{name}",), less=less) for name in norms}, **own}
    names = model.traits.parameters(model, "layer")
    of_layer = _GEMMA.__getitem__ if _kind(model) in GEMMAS else _of_layer
    return {ours: of_layer(ours).within(f"model.layers.{int(part[len('layer-') :])}.") for ours in names}


def _of_layer(ours: str) -> Twin:
    if ours == "router.weight":
        return _ROUTER
    expert = re.fullmatch(r"experts\.(\d+)\.(.+)", ours)
    if expert is None:
        return _LAYER[ours]
    return Twin(tuple(f"block_sparse_moe.experts.{expert[1]}.{name}" for name in _EXPERT[expert[2]]))


def config_of(model: ModelConfig) -> Dict[str, Any]:
    """config.json of a model."""
    factor, kind, own = model.rope_scaling_factor, str(_kind(model)), model.own(GptOptions)
    stablelm = {"partial_rotary_factor": model.rotary_percent, "use_qkv_bias": own.add_qkv_bias}
    experts = {"num_local_experts": own.experts, "num_experts_per_tok": own.experts_per_token}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **(_gemma(model, kind) if kind in GEMMAS else {"hidden_act": "silu"}),
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_width,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "layer_norm_eps" if kind == STABLELM else "rms_norm_eps": model.norm_epsilon,
        **({} if kind == GEMMA3 else {"rope_theta": model.rotary_base}),
        "rope_scaling": None if factor is None else {"rope_type": "llama3", "factor": factor, **LLAMA3},
        **({"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear} if kind == "llama" else {}),
        **({} if kind in ("llama", STABLELM) else _windows(model, kind)),
        **(stablelm if kind == STABLELM else {}),
        **(experts if kind == MIXTRAL else {}),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gemma(model: ModelConfig, kind: str) -> Dict[str, Any]:
    own = model.own(GptOptions)
    local = model.rotary_base if own.sliding_rotary_base is None else own.sliding_rotary_base
    bases = {FULL: model.rotary_base, SLIDING: local}
    positions = {of: {"rope_type": "default", "rope_theta": base} for of, base in bases.items()}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": own.attention_softcap,
        "final_logit_softcapping": own.logits_softcap,
        "query_pre_attn_scalar": model.head_width if own.query_scalar is None else own.query_scalar,
        **({"rope_parameters": positions} if kind == GEMMA3 else {}),
    }


def _windows(model: ModelConfig, kind: str) -> Dict[str, Any]:
    own = model.own(GptOptions)
    if kind == "mistral" or (own.sliding_window is None and kind not in GEMMAS):
        return {"sliding_window": own.sliding_window}
    types = [SLIDING if slides(own, number) else FULL for number in range(model.layers)]
    if kind in GEMMAS:
        window = model.sequence_length if own.sliding_window is None else own.sliding_window
        return {"sliding_window": window, "layer_types": types}
    return {
        "use_sliding_window": True,
        "sliding_window": own.sliding_window,
        "layer_types": types,
        "max_window_layers": 0,
    }


def model_of(path: Path, config: Dict[str, Any], sequence: Optional[int]) -> ModelConfig:
    """The model that the config.json beside `path` describes, for sequences of this length, or of the longest that it
    allows. Raises EngineError: a key is missing or wrong, or the engine does not compute such a model."""
    path = path.parent / "config.json"
    experts: Dict[str, object] = {}
    if config.get("model_type") == MIXTRAL:  # a Mistral with experts, and without a window unless it is said
        experts = {
            "experts": config.get("num_local_experts", 8),
            "experts_per_token": config.get("num_experts_per_tok", 2),
        }
        config = {**config, "model_type": "mistral", "sliding_window": config.get("sliding_window")}
    values = {**family_named(DEFAULT).from_hf(HfConfig(str(path), config, sequence)), **experts}
    content = {"rope_scaling_factor": None, **values, "padded_vocab_size": values["vocab_size"]}
    try:
        check_object(ModelConfig, content, "model", whole=True)
    except PlanFault as error:
        raise EngineError(f"{path}: not a model that the engine computes: {error}") from error
    model: ModelConfig = build(ModelConfig, content)
    if (model.kv_channels is None and model.hidden % model.heads) or model.heads % model.query_groups:
        raise EngineError(
            f"{path}: num_attention_heads={model.heads} must divide hidden_size={model.hidden}, and be a multiple of "
            f"num_key_value_heads={model.query_groups}"
        )
    return model
