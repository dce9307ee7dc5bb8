"""The model of a checkpoint that Megatron-LM saved, by the arguments that it keeps there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping

from megatron_ext.checkpoints.foreign.torch_dist import COMMON, folder_of, read_common, weights_alone
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.keys import ranges_of
from megatron_ext.contract.models.keys import LEARNED, ROTARY, Sizes
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan_check import PlanFault, build, check_object, fault

_SIZES = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_OPTIONS = {
    **{"kv_channels": "kv_channels", "normalization": "normalization", "norm_epsilon": "norm_epsilon"},
    **{name: name for name in ("position_embedding_type", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm")},
    "untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
}
_OTHERS = {
    **{"multi_latent_attention": False, "apply_residual_connection_post_layernorm": False, "squared_relu": False},
    **{"quick_geglu": False, "apply_layernorm_1p": False, "rotary_interleaved": False, "window_size": None},
    **{"rotary_seq_len_interpolation_factor": None, "mtp_num_layers": None, "moe_router_pre_softmax": False},
    **{"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax"},
    **{"no_rope_freq": None, "qk_l2_norm": False, "softmax_type": "vanilla", "window_attn_skip_freq": None},
    **{"openai_gelu": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None},
    **{"moe_apply_probs_on_input": False},
    **{"moe_router_enable_expert_bias": False, "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None},
}
"""Arguments in which every model here is the same, with what they then are."""


def model_in(path: Path) -> ModelConfig:
    """The model of a folder. Raises EngineError: nothing there says what it is, or no model here is such a one."""
    common, file = read_common(path), folder_of(path) / COMMON
    args = getattr(common.get("args"), "__dict__", None)
    if args is None:
        raise EngineError(
            f"{file}: has no arguments of Megatron-LM, which would say what the model is; {weights_alone(path)}"
        )
    others = [f"{name}={args[name]!r}" for name, usual in _OTHERS.items() if args.get(name, usual) not in (usual, None)]
    if others:
        raise EngineError(f"{file}: a model with {', '.join(others)}, of which tdpp has none")
    try:
        content = _content(args)
        check_object(ModelConfig, content, "model", whole=True)
        for key, within in {**ranges_of(ModelConfig), **ranges_of(Sizes)}.items():  # as for what a user gives
            must = within.broken_by(content[key]) if key in content else ""
            if must:
                raise fault(f"model.{key}", content[key], must)
    except (PlanFault, KeyError, TypeError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else error
        raise EngineError(
            f"{file}: its arguments do not say what the model is: {told}; {weights_alone(path)}"
        ) from error
    return build(ModelConfig, content)


def _content(args: Mapping[str, Any]) -> Dict[str, Any]:
    """The keys of a model by Megatron-LM's arguments."""
    found = {ours: args[theirs] for ours, theirs in _SIZES.items()}
    found.update({ours: args[theirs] for ours, theirs in _OPTIONS.items() if args.get(theirs) is not None})
    experts, positions = args.get("num_experts"), found.get("position_embedding_type", LEARNED)
    found["sequence_length"] = args["max_position_embeddings" if positions == LEARNED else "seq_length"]
    found["vocab_size"] = found["padded_vocab_size"] = args.get("vocab_size") or args["padded_vocab_size"]
    found["ffn_hidden"] = (args.get("moe_ffn_hidden_size") if experts else None) or args["ffn_hidden_size"]
    if args.get("group_query_attention"):
        found["num_query_groups"] = args["num_query_groups"]
    if experts:
        found.update(experts=experts, experts_per_token=args.get("moe_router_topk", 2))
    if positions == ROTARY:
        found.update(rotary_base=args["rotary_base"], rotary_percent=args.get("rotary_percent", 1.0))
        if args.get("use_rope_scaling"):
            found["rope_scaling_factor"] = args.get("rope_scaling_factor", 8.0)
    return found
