"""Hugging Face's config.json as a model here: what maps is taken, what would be another model is refused.

Every family is a function from the file's keys to keys of `model`. Differences that leave the sizes as they are, and
that the families here have of their own accord (Megatron-LM's BERT has its norms in front), are notes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.errors import LaunchError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaled rotary embedding that the engine computes."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class FromHf:
    """A model as it is written."""

    values: dict[str, object]
    notes: tuple[str, ...] = ()


@dataclass
class _Config:
    """The file's content. Whoever reads a key says what it may be."""

    path: str
    content: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, value: object, why: str) -> LaunchError:
        return LaunchError(f"{self.path}: {key}={json.dumps(value, default=str)}: {why}")

    def given(self, key: str, default: object = _MISSING) -> Any:
        value = self.content.get(key, default)
        if value is _MISSING:
            raise LaunchError(f"{self.path}: {key} is missing; a {self.content['model_type']} needs it")
        return default if value is None and default is not _MISSING else value

    def size(self, key: str, default: object = _MISSING) -> int:
        value = self.given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.given(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(key, value, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.given(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "must be true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """Empty where it is absent or null."""
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise self.refuse(key, value, "must be an object")
        return value

    def must(self, key: str, allowed: object, why: str) -> None:
        """Requires a value that may be absent, which stands for what is allowed. `allowed` may be a tuple of values."""
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        value = self.content.get(key, values[0])
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            raise self.refuse(key, value, f"{why}; only {' or '.join(map(json.dumps, values))} can be imported")


def from_hf(path: str, content: object, sequence_length: int | None = None) -> FromHf:
    """The model that a config.json describes, for sequences of this length, or of the longest that it knows.

    Raises:
        LaunchError: no family here is that model; the message names the key, its value and why.
    """
    if not isinstance(content, dict):
        raise LaunchError(f"{path}: must be a JSON object, as Hugging Face's config.json is")
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise LaunchError(
            f"{path}: model_type={json.dumps(kind)}: tdpp has no such model family; it imports "
            f"{', '.join(_FAMILIES)}. docs/your-model.md shows how to train a module of your own"
        )
    config = _Config(path, content)
    config.must("is_encoder_decoder", kind == "t5", "the model has another architecture than tdpp's")
    config.must("add_cross_attention", False, "tdpp has no cross-attention to another model")
    values = _FAMILIES[kind](config)
    if sequence_length is not None:
        longest = values.get("sequence_length")
        if longest is None:
            raise LaunchError(f"--sequence-length {sequence_length}: a {kind} has no sequences; leave it out")
        if isinstance(longest, int) and sequence_length > longest and kind != "t5":
            raise LaunchError(
                f"--sequence-length {sequence_length}: {path} has positions up to {longest}; give at most that"
            )
        values["sequence_length"] = sequence_length
    _check_window(config, values)
    return FromHf(values=values, notes=tuple(config.notes))


def _gpt2(config: _Config) -> dict[str, object]:
    config.must("activation_function", TANH_GELU, "the MLP of tdpp's GPT uses the tanh GELU")
    config.must("scale_attn_weights", True, "tdpp always scales attention by the width of a head")
    config.must("scale_attn_by_inverse_layer_idx", False, "tdpp scales attention alike in all layers")
    dropout = config.number("resid_pdrop", 0.1)
    if (embedding := config.number("embd_pdrop", 0.1)) != dropout:
        raise config.refuse(
            "embd_pdrop", embedding, f"tdpp uses one dropout for embeddings and layers, resid_pdrop={dropout:g}"
        )
    hidden = config.size("n_embd")
    inner = config.size("n_inner", 4 * hidden)
    return {
        "layers": config.size("n_layer"),
        "hidden": hidden,
        "heads": config.size("n_head"),
        "sequence_length": config.size("n_positions", config.content.get("n_ctx", 1024)),
        "vocab_size": config.size("vocab_size"),
        **_unless({"ffn_hidden": inner}, ffn_hidden=4 * hidden),
        **_unless({"norm_epsilon": config.number("layer_norm_epsilon", 1e-5)}, norm_epsilon=1e-5),
        **_untied(config, True),
        **_dropouts(dropout, config.number("attn_pdrop", 0.1)),
    }


def _llama(config: _Config) -> dict[str, object]:
    config.must("hidden_act", "silu", "tdpp's gated MLP uses SiLU")
    config.must("pretraining_tp", 1, "tdpp does not split matrix products")
    bias = config.flag("attention_bias", False)
    config.must("mlp_bias", bias, f"all or no linear layers have biases in tdpp, and attention_bias={json.dumps(bias)}")
    config.must("partial_rotary_factor", 1.0, "tdpp's rotary positions rotate the whole head")
    rope = config.table("rope_parameters")  # where transformers 5 keeps base and scaling
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    width = config.given("head_dim", None)
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        **_unless({"num_query_groups": config.size("num_key_value_heads", heads)}, num_query_groups=heads),
        **({} if width is None or width * heads == hidden else {"kv_channels": config.size("head_dim")}),
        "ffn_hidden": config.size("intermediate_size"),
        "sequence_length": config.size("max_position_embeddings", 2048),
        "vocab_size": config.size("vocab_size"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope",
        "rotary_base": config.number("rope_theta", rope.get("rope_theta", 10000.0)),
        **_scaling(config, rope),
        "swiglu": True,
        **({} if bias else {"add_bias_linear": False}),
        **_untied(config, False),
        **_dropouts(0.0, config.number("attention_dropout", 0.0)),
    }


def _mistral(config: _Config) -> dict[str, object]:
    config.must("attention_bias", False, "a Mistral has no biases")
    return _llama(config)


def _check_window(config: _Config, values: Mapping[str, object]) -> None:
    """A window that no token of a sequence looks beyond changes nothing."""
    if config.content["model_type"] != "mistral":
        return
    length = values["sequence_length"]
    if config.content.get("sliding_window", 4096) is None:
        return
    window = config.size("sliding_window", 4096)
    if isinstance(length, int) and window < length:
        raise config.refuse(
            "sliding_window",
            window,
            f"tdpp has no sliding-window attention, which sequences of {length} tokens need; --sequence-length "
            f"{window} fits into the window",
        )


def _scaling(config: _Config, rope: Mapping[str, Any]) -> dict[str, object]:
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
        raise config.refuse(f"{key}.{name}", wrong[name], why)
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise config.refuse(f"{key}.factor", factor, "must be a number")
    return {"rope_scaling_factor": float(factor)}


def _bert(config: _Config) -> dict[str, object]:
    config.must("hidden_act", ("gelu", *TANH_GELU), "an MLP here has GELU")
    config.must("position_embedding_type", "absolute", "tdpp's BERT uses learned positions")
    config.must("type_vocab_size", 2, "tdpp's BERT has two token types")
    config.must("is_decoder", False, "tdpp's BERT is an encoder")
    config.notes.append("As in Megatron-LM, norms come before attention and MLP (in Hugging Face's after them),")
    config.notes.append("and GELU uses tanh. Sizes and parameters are the same; checkpoints cannot be exchanged.")
    return {
        "family": "bert",
        **_encoder(config),
        "sequence_length": config.size("max_position_embeddings", 512),
        "vocab_size": config.size("vocab_size"),
        **_untied(config, True),
    }


def _t5(config: _Config) -> dict[str, object]:
    activation = config.given("feed_forward_proj", "relu")
    if activation not in ("relu", "gated-gelu", "gated-silu"):
        raise config.refuse("feed_forward_proj", activation, "tdpp's MLP uses GELU or a gate")
    gated = activation.startswith("gated")
    buckets = config.size("relative_attention_num_buckets", 32)
    config.notes.append(f"Unlike Hugging Face's, positions are rotary, not {buckets} relative biases, and the MLP has")
    config.notes.append(f"{'a gate of SiLU' if gated else 'GELU'}, not {activation}. Checkpoints cannot be exchanged.")
    hidden, heads, width = config.size("d_model"), config.size("num_heads"), config.size("d_kv", 64)
    layers, dropout = config.size("num_layers"), config.number("dropout_rate", 0.1)
    decoder = config.size("num_decoder_layers", layers)
    return {
        "family": "t5",
        "layers": layers,
        **_unless({"decoder_layers": decoder}, decoder_layers=layers),
        "hidden": hidden,
        "heads": heads,
        **({} if width * heads == hidden else {"kv_channels": width}),
        "ffn_hidden": config.size("d_ff"),
        "sequence_length": config.size("n_positions", 512),
        "vocab_size": config.size("vocab_size"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-6),
        "position_embedding_type": "rope",
        **({"swiglu": True} if gated else {}),
        "add_bias_linear": False,
        **_untied(config, True),
        **_dropouts(dropout, dropout),
    }


def _vit(config: _Config) -> dict[str, object]:
    config.must("hidden_act", "gelu", "the MLP of tdpp's ViT uses GELU")
    config.must("qkv_bias", True, "the attention of tdpp's ViT has biases")
    return {
        "family": "vit",
        **_encoder(config),
        "image_size": config.size("image_size", 224),
        "patch_size": config.size("patch_size", 16),
        **_unless({"channels": config.size("num_channels", 3)}, channels=3),
        "classes": _classes(config),
    }


def _resnet(config: _Config) -> dict[str, object]:
    config.must("layer_type", "bottleneck", "tdpp's ResNet has bottleneck blocks")
    config.must("hidden_act", "relu", "tdpp's ResNet uses ReLU")
    config.must("downsample_in_first_stage", False, "the first stage of tdpp's ResNet does not downsample")
    config.must("downsample_in_bottleneck", False, "tdpp's ResNet downsamples in the 3 x 3 convolution of a bottleneck")
    width, depths = config.size("embedding_size", 64), config.given("depths", [3, 4, 6, 3])
    if not isinstance(depths, list) or not all(type(depth) is int and depth > 0 for depth in depths):
        raise config.refuse("depths", depths, "must be a list of whole numbers of at least 1")
    widths = config.given("hidden_sizes", [256, 512, 1024, 2048])
    expected = [4 * width * 2**stage for stage in range(len(depths))]
    if widths != expected:
        raise config.refuse("hidden_sizes", widths, f"in tdpp they follow from embedding_size={width}: {expected}")
    config.notes.append("config.json gives no image size; model.image_size may be changed.")
    return {
        "family": "resnet",
        "depths": "-".join(map(str, depths)),
        **_unless({"width": width}, width=64),
        "image_size": 224,
        **_unless({"channels": config.size("num_channels", 3)}, channels=3),
        "classes": _classes(config),
    }


def _encoder(config: _Config) -> dict[str, object]:
    """What a BERT and a ViT call alike."""
    hidden = config.size("hidden_size", 768)
    inner = config.size("intermediate_size", 3072)
    return {
        "layers": config.size("num_hidden_layers", 12),
        "hidden": hidden,
        "heads": config.size("num_attention_heads", 12),
        **_unless({"ffn_hidden": inner}, ffn_hidden=4 * hidden),
        "norm_epsilon": config.number("layer_norm_eps", 1e-12),
        **_dropouts(config.number("hidden_dropout_prob", 0.1), config.number("attention_probs_dropout_prob", 0.1)),
    }


def _classes(config: _Config) -> int:
    labels = config.content.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else config.size("num_labels", 2)


def _untied(config: _Config, tied_by_default: bool) -> dict[str, object]:
    tied = config.flag("tie_word_embeddings", tied_by_default)
    return {} if tied else {"untie_embeddings_and_output_weights": True}


def _dropouts(hidden: float, attention: float) -> dict[str, object]:
    found: dict[str, object] = {"hidden_dropout": hidden, "attention_dropout": attention}
    return _unless(found, hidden_dropout=0.0, attention_dropout=0.0)


def _unless(values: dict[str, object], **usual: object) -> dict[str, object]:
    """Leaves out what the schema has by itself."""
    return {key: value for key, value in values.items() if value != usual[key]}


_FAMILIES: dict[str, Callable[[_Config], dict[str, object]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
}
"""The reader of each family, by `model_type` of config.json."""
