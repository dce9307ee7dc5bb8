"""GPT-2, Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3: decoders that predict the next token."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, Dict, Mapping, Sequence

from megatron_ext.contract.models.hf_config import TANH_GELU, HfConfig, dropouts, unless
from megatron_ext.contract.models.keys import ROTARY
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.models.pieces import Parameter, Parameters, Stack, linear_parameters
from megatron_ext.contract.models.tokens import TransformerFamily, matrices, norm
from megatron_ext.families.gpt.options import GptOptions

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaled rotary embedding that the engine computes."""


SLIDING, FULL = "sliding_attention", "full_attention"
"""In `layer_types`, a layer with a sliding window, and one without."""
STABLELM = "stablelm"
"""A Llama with LayerNorms, of whose heads a part is rotated."""
GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
GEMMAS = (GEMMA2, GEMMA3)
_GROUPS = {"mistral": 8, "qwen2": 32, "qwen3": 32, GEMMA2: 4, GEMMA3: 4}
_POSITIONS = {"mistral": 131072, "qwen2": 32768, "qwen3": 32768, GEMMA2: 8192, GEMMA3: 131072}
_WIDTHS = {"qwen3": 128, GEMMA2: 256, GEMMA3: 256}
"""What transformers takes where config.json lacks `num_key_value_heads`, `max_position_embeddings` and `head_dim`."""
_MLP = ("mlp_in.", "mlp_out.")


class _Gpt(TransformerFamily):
    name = "gpt"
    summary = "A decoder that predicts the next token; with Llama's options, a Llama."
    model_types = ("gpt2", "llama", "mistral", "qwen2", "qwen3", STABLELM, *GEMMAS)
    running_text = True
    packs = True
    metrics = ("loss", "perplexity")
    megatron_core = megatron_lm = True
    options = (*TransformerFamily.options, *(one.name for one in fields(GptOptions)))

    def layer(self, model: ModelConfig, stack: Stack) -> Parameters:
        """With experts, these have the MLP's parameters each, and the router has one row for each of them."""
        found, own = super().layer(model, stack), model.own(GptOptions)
        if own.add_qkv_bias:
            found.update(linear_parameters("qkv", found["qkv.weight"], True))
        if own.qk_layernorm:
            found.update({**norm(model, "query_norm", model.head_width), **norm(model, "key_norm", model.head_width)})
        if own.post_norms:
            found.update({**norm(model, "attention_post_norm"), **norm(model, "mlp_post_norm")})
        if own.experts is None:
            return found
        mlp = {name: one for name, one in found.items() if name.startswith(_MLP)}
        return {
            **{name: one for name, one in found.items() if name not in mlp},
            "router.weight": Parameter((own.experts, model.hidden)),
            **{f"experts.{number}.{name}": one for number in range(own.experts) for name, one in mlp.items()},
        }

    def inside_activations(self, model: ModelConfig, kind: str, fused: bool = False) -> int:
        own = model.own(GptOptions)
        turned = model.position_embedding_type == ROTARY and model.query_groups < model.heads
        before = (model.heads + 2 * model.query_groups) * model.head_width  # what the norms of heads take
        normed = before * model.sequence_length if own.qk_layernorm and turned and kind == "layer" else 0
        working = model if own.experts is None else replace(model, ffn_hidden=own.experts_per_token * model.inner)
        return normed + super().inside_activations(working, kind, fused)

    def outside_activations(self, model: ModelConfig, kind: str) -> int:
        """Count the inputs of the norms behind attention and MLP, too."""
        behind = 2 * model.sequence_length * model.hidden if model.own(GptOptions).post_norms and kind == "layer" else 0
        return behind + super().outside_activations(model, kind)

    def operations(self, model: ModelConfig, kind: str) -> int:
        """Count, of the experts, those that work on a token."""
        whole, own = super().operations(model, kind), model.own(GptOptions)
        if own.experts is None or kind != "layer":
            return whole
        idle = own.experts - own.experts_per_token
        of_expert = {name: one for name, one in self.parameters(model, kind).items() if name.startswith("experts.0.")}
        return whole - 2 * model.sequence_length * idle * matrices(of_expert)

    def from_hf(self, config: HfConfig) -> Dict[str, object]:
        if config.kind == "gpt2":
            return _gpt2(config)
        if config.kind != "llama":
            why = f"a {config.kind} of tdpp has no biases of that kind"
            config.must("attention_bias", False, why)
        values = _llama(config)
        values.update(_windows(config, int(str(values["layers"])), int(str(values["sequence_length"]))))
        if config.kind == "qwen2":
            values["add_qkv_bias"] = True
        if config.kind == "qwen3":
            values["qk_layernorm"] = True
        if config.kind == STABLELM:
            values.update(_stablelm(config))
            del values["normalization"]
        if config.kind in GEMMAS:
            values.update(_gemma(config))
        return values


def _gpt2(config: HfConfig) -> Dict[str, object]:
    config.must("activation_function", TANH_GELU, "the MLP of tdpp's GPT uses the tanh GELU")
    config.must("scale_attn_weights", True, "tdpp always scales attention by the width of a head")
    config.must("scale_attn_by_inverse_layer_idx", False, "tdpp scales attention alike in all layers")
    dropout = config.number("resid_pdrop", 0.1)
    if (embedding := config.number("embd_pdrop", 0.1)) != dropout:
        raise config.differs(
            "embd_pdrop", embedding, f"tdpp uses one dropout for embeddings and layers, resid_pdrop={dropout:g}"
        )
    hidden = config.size("n_embd")
    inner = config.size("n_inner", 4 * hidden)
    return {
        "layers": config.size("n_layer"),
        "hidden": hidden,
        "heads": config.size("n_head"),
        "sequence_length": config.length(config.size("n_positions", config.content.get("n_ctx", 1024))),
        "vocab_size": config.size("vocab_size"),
        **unless({"ffn_hidden": inner}, ffn_hidden=4 * hidden),
        **unless({"norm_epsilon": config.number("layer_norm_epsilon", 1e-5)}, norm_epsilon=1e-5),
        **config.untied(True),
        **dropouts(dropout, config.number("attn_pdrop", 0.1)),
    }


def _llama(config: HfConfig) -> Dict[str, object]:
    gemma = config.kind in GEMMAS
    if not gemma:
        config.must("hidden_act", "silu", "tdpp's gated MLP uses SiLU")
    config.must("pretraining_tp", 1, "tdpp does not split matrix products")
    bias = config.flag("attention_bias", False)
    config.must("mlp_bias", bias, f"all or no linear layers have biases in tdpp, and attention_bias={json.dumps(bias)}")
    if config.kind != STABLELM:
        config.must("partial_rotary_factor", 1.0, f"transformers rotates whole heads of a {config.kind}")
    rope = config.table("rope_parameters")  # where transformers 5 keeps base and scaling
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.kind == GEMMA3:  # a table for each kind of layer
        rope = _rotary_of(rope, FULL)
    width = config.given("head_dim", _WIDTHS.get(config.kind))
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        **unless(
            {"num_query_groups": config.size("num_key_value_heads", _GROUPS.get(config.kind, heads))},
            num_query_groups=heads,
        ),
        **({} if width is None or width * heads == hidden else {"kv_channels": config.size("head_dim", width)}),
        "ffn_hidden": config.size("intermediate_size"),
        "sequence_length": config.length(config.size("max_position_embeddings", _POSITIONS.get(config.kind, 2048))),
        "vocab_size": config.size("vocab_size"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope",
        "rotary_base": config.number("rope_theta", rope.get("rope_theta", 1e6 if config.kind == GEMMA3 else 1e4)),
        **_scaling(config, rope),
        "swiglu": True,
        **({} if bias else {"add_bias_linear": False}),
        **config.untied(gemma),
        **dropouts(0.0, config.number("attention_dropout", 0.0)),
    }


def _stablelm(config: HfConfig) -> Dict[str, object]:
    """What is not as in a Llama."""
    config.must("qk_layernorm", False, "tdpp normalizes the queries and keys of all heads with the same weights")
    config.must("use_parallel_residual", False, "tdpp's MLP takes the result of the attention")
    config.must("hidden_dropout", (0.0, 0), "tdpp drops numbers after the attention, too")
    rope = config.table("rope_parameters")
    return {
        "norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "rotary_percent": config.number("partial_rotary_factor", rope.get("partial_rotary_factor", 0.25)),
        **unless({"add_qkv_bias": config.flag("use_qkv_bias", False)}, add_qkv_bias=False),
    }


def _gemma(config: HfConfig) -> Dict[str, object]:
    """What is not as in a Llama. Its norms multiply by 1 + w: `hf_llama` adds the 1."""
    config.must("hidden_activation", "gelu_pytorch_tanh", "the gate of tdpp's MLP is SiLU or the tanh GELU")
    if behind := config.given("use_bidirectional_attention", False):
        raise config.differs("use_bidirectional_attention", behind, "no token of tdpp's GPT sees those after it")
    found: Dict[str, object] = {"post_norms": True, "scale_embedding": True, "geglu": True}
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if config.kind == GEMMA2 else {}
    for key, ours in (("attn_logit_softcapping", "attention_softcap"), ("final_logit_softcapping", "logits_softcap")):
        if config.content.get(key, usual.get(key)) is not None:
            found[ours] = config.number(key, usual.get(key, 0.0))
    scalar = config.size("query_pre_attn_scalar", 256)
    if scalar != config.given("head_dim", _WIDTHS[config.kind]):
        found["query_scalar"] = scalar
    if config.kind == GEMMA3:
        found["qk_layernorm"] = True
        local = _rotary_of(config.table("rope_parameters"), SLIDING)
        if (kind := local.get("rope_type", "default")) != "default":
            raise config.differs(f"rope_parameters.{SLIDING}.rope_type", kind, "tdpp does not scale these positions")
        found["sliding_rotary_base"] = config.number("rope_local_base_freq", local.get("rope_theta", 1e4))
    return found


def _rotary_of(rope: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """What a Gemma 3 says of the positions of its layers of a kind."""
    found = rope.get(kind)
    return found if isinstance(found, dict) else {}


def _windows(config: HfConfig, layers: int, length: int) -> Dict[str, object]:
    """Which layers see how far; nothing where no token of a sequence looks beyond a window."""
    gemma = config.kind in GEMMAS
    slides = (
        gemma
        or config.kind == "mistral"
        or (config.kind.startswith("qwen") and config.flag("use_sliding_window", False))
    )
    if not slides or config.content.get("sliding_window", 4096) is None:
        return {}
    window = config.size("sliding_window", 4096)
    full = [number for number, kind in enumerate(_layer_types(config, layers), 1) if kind != SLIDING]
    if (window >= length and not gemma) or len(full) == layers:  # a Gemma's kinds of layers differ otherwise, too
        return {}
    if not full:
        return {"sliding_window": window}
    every = full[0]
    if full != list(range(every, layers + 1, every)):
        raise config.differs(
            "layer_types", config.content.get("layer_types"), "tdpp's layers see all tokens at regular intervals"
        )
    return {"sliding_window": window, "full_attention_every": every}


def _layer_types(config: HfConfig, layers: int) -> Sequence[object]:
    given = config.content.get("layer_types")
    if config.kind == "mistral":
        return [SLIDING] * layers
    if given is None and config.kind in GEMMAS:
        every = 2 if config.kind == GEMMA2 else config.size("sliding_window_pattern", 6)
        return [FULL if number % every == 0 else SLIDING for number in range(1, layers + 1)]
    if given is None:
        first = config.given("max_window_layers", 28)
        return [SLIDING if isinstance(first, int) and number >= first else FULL for number in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise config.refuse("layer_types", given, f"must be a list of num_hidden_layers={layers} words")
    return given


def _scaling(config: HfConfig, rope: Mapping[str, Any]) -> Dict[str, object]:
    key = "rope_scaling" if config.content.get("rope_scaling") else "rope_parameters"
    scaling = config.table("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}
    other = {name: scaling.get(name) for name, value in LLAMA3.items() if scaling.get(name, value) != value}
    if kind != "llama3" or other:
        wrong = other or {"rope_type": kind}
        expected = LLAMA3 if other else {"rope_type": "llama3"}
        name = next(iter(wrong))
        why = f"tdpp scales rotary positions only as Llama 3 does, with {name}={json.dumps(expected[name])}"
        raise config.differs(f"{key}.{name}", wrong[name], why)
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise config.refuse(f"{key}.factor", factor, "must be a number")
    return {"rope_scaling_factor": float(factor)}


FAMILY = _Gpt()
