"""A model from Hugging Face's config.json has the parameters of transformers' own; what is another model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf import compose as composing_module
from conf.compose import compose_unchecked, to_object
from conf.schema.experiment import Model
from launch import cli
from launch.commands.init_model import from_hf
from launch.errors import LaunchError
from tests.support.composing import COMPOSED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
GROUPED = {"hidden_size": 4096, "num_key_value_heads": 8, "intermediate_size": 14336}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "GPT-2 of other widths": ("GPT2Config", "GPT2LMHeadModel", {"n_inner": 1000, "tie_word_embeddings": False}),
    "Llama 2": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Llama 3.1": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED | {"vocab_size": 128256, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    ),
    "Llama 3.2": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED | {"tie_word_embeddings": True, "head_dim": 64, "attention_bias": True, "mlp_bias": True},
    ),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "Qwen 2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 8}),
    "Qwen 3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", {}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 100}),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", {"num_key_value_heads": 8, "use_qkv_bias": True}),
    "Mamba": ("MambaConfig", "MambaForCausalLM", {"num_hidden_layers": 2, "time_step_rank": 40, "expand": 3}),
    "BERT": ("BertConfig", "BertForPreTraining", {}),
    "ViT": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
    "ResNet": ("ResNetConfig", "ResNetForImageClassification", {"num_labels": 1000, "depths": [3, 4, 23, 3]}),
    "T5": ("T5Config", "T5ForConditionalGeneration", {"num_decoder_layers": 4}),
    "T5 1.1": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 128},
    ),
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def empty_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TDPP_CONFIG", raising=False)
    monkeypatch.setattr(composing_module, "_composed", COMPOSED)  # what is read changes from test to test


def written(content: dict[str, Any], *options: str) -> Model:
    """The model that the command writes of it."""
    Path("their").mkdir(exist_ok=True)
    Path("their/config.json").write_text(json.dumps(content))
    assert cli.main(["init", "model", "their", "ours", *options]) == 0
    return to_object(compose_unchecked(["model=ours"]), Model, "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_of_transformers_own(name: str) -> None:
    config_class, model_class, given = MODELS[name]
    config = getattr(transformers, config_class)(**given)
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in getattr(transformers, model_class)(config).parameters())
    ours = written(json.loads(config.to_json_string())).parameters()
    if name.startswith("T5"):  # positions are rotary here, and tied logits have a bias, as in Megatron-LM
        theirs -= 2 * config.relative_attention_num_buckets * config.num_heads
        theirs += config.vocab_size * config.tie_word_embeddings
    assert ours == theirs


def test_a_llama_keeps_its_positions_and_norms() -> None:
    model = written(
        LLAMA | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, "--sequence-length=32"
    )
    assert (model.norm_epsilon, model.rotary_base, model.rope_scaling_factor) == (1e-5, 5e5, 8)
    assert (model.normalization, model.sequence_length, model.swiglu) == ("RMSNorm", 32, True)
    assert (model.untie_embeddings_and_output_weights, model.add_bias_linear) == (True, False)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model_type": "qwen2_moe"}, "num_hidden_layers is missing; a qwen2_moe needs it"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}},
            "a gemma3 consists of several models (text_config, vision_config), and tdpp trains one of text alone",
        ),
        (LLAMA | {"hidden_size": "64"}, 'hidden_size="64": must be a whole number'),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size is missing; a llama needs it"),
        (LLAMA | {"is_encoder_decoder": True}, "the model has another architecture than tdpp's"),
        (LLAMA | {"model_type": "gpt2", "add_cross_attention": True}, "tdpp has no cross-attention"),
        ({"model_type": "mamba", "num_hidden_layers": 2, "use_bias": True}, "the mixer of tdpp's Mamba has no biases"),
        (
            {"model_type": "mamba", "num_hidden_layers": 2, "intermediate_size": 1000},
            "intermediate_size=1000: must be expand=2 times hidden_size=768",
        ),
        ({"model_type": "bert", "vocab_size": 9, "type_vocab_size": 1}, "type_vocab_size=1: tdpp's BERT has two"),
        ({"model_type": "resnet", "layer_type": "basic"}, "tdpp's ResNet has bottleneck blocks"),
        ({"model_type": "resnet", "hidden_sizes": [1, 2, 3, 4]}, "hidden_sizes=[1, 2, 3, 4]: in tdpp they follow from"),
        ({"model_type": "vit", "qkv_bias": False}, "qkv_bias=false: the attention of tdpp's ViT has biases"),
        ({"model_type": "gpt2", "activation_function": "relu"}, 'activation_function="relu"'),
        (LLAMA | {"rope_scaling": "linear"}, 'rope_scaling="linear": must be an object'),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor=null: must be a number"),
        (LLAMA | {"model_type": "mistral", "sliding_window": "16"}, 'sliding_window="16": must be a whole number'),
        ({"model_type": "resnet", "depths": 3}, "depths=3: must be a list of whole numbers"),
        ({"model_type": ["gpt2"]}, 'model_type=["gpt2"]: must name a family of transformers'),
        ([], "must be a JSON object"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_another_model_is_refused_with_the_key_the_value_and_why(content: object, told: str) -> None:
    with pytest.raises(LaunchError) as error:
        from_hf("config.json", content)
    assert str(error.value).startswith("config.json: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"hidden_act": "relu"}, 'hidden_act="relu": tdpp\'s gated MLP uses SiLU; only "silu" can be imported'),
        ({"attention_bias": True, "mlp_bias": False}, "mlp_bias=false: all or no linear layers have biases"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 'rope_scaling.rope_type="linear": tdpp scales rotary'),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 8.0}}, "rope_scaling.high_freq_factor=8.0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "layer_types=null: tdpp's layers see all tokens at regular intervals",
        ),
        (
            {"model_type": "gpt2", "activation_function": "relu", "n_positions": 64, "n_embd": 64, "n_layer": 2}
            | {"n_head": 4},
            'activation_function="relu"',
        ),
    ],
    ids=["activation", "biases", "linear rope", "another Llama 3 rope", "window", "GPT-2"],
)
def test_what_tdpp_computes_differently_is_trained_by_transformers(other: dict[str, Any], told: str) -> None:
    values, (note,) = from_hf("config.json", LLAMA | other)
    assert values == {
        **{"family": "huggingface", "layers": 2, "hidden": 64, "heads": 4, "vocab_size": 100},
        **{"sequence_length": 128, "config": str(Path("config.json").absolute())},
    }
    assert note.startswith(f"tdpp's own is another model ({told}")
    assert "trained with transformers' own layers" in note


def test_a_model_within_its_window_stays_tdpps_own() -> None:
    values, notes = from_hf("config.json", LLAMA | {"model_type": "mistral", "sliding_window": 16}, 16)
    assert ("family" in values, values["sequence_length"], notes) == (False, 16, [])
    assert "sliding_window" not in values


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "content", "own"),
    [
        ("mistral", {"sliding_window": 16}, {"sliding_window": 16}),
        ("qwen2", {}, {"add_qkv_bias": True}),
        ("qwen2", {"sliding_window": 16}, {"add_qkv_bias": True}),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
            {"add_qkv_bias": True, "sliding_window": 16},
        ),
        ("qwen3", {"head_dim": 16}, {"qk_layernorm": True}),
        ("qwen3", {}, {"qk_layernorm": True, "kv_channels": 128}),
        (
            "qwen3",
            {"head_dim": 16, "sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
            {"qk_layernorm": True, "sliding_window": 16, "full_attention_every": 2},
        ),
    ],
)
def test_qwens_and_mistrals_are_tdpps_own(kind: str, content: dict[str, Any], own: dict[str, object]) -> None:
    values, notes = from_hf("config.json", {**LLAMA, "model_type": kind, "num_key_value_heads": 2, **content})
    usual, _ = from_hf("config.json", {**LLAMA, "num_key_value_heads": 2})
    assert (values, notes) == ({**usual, **own}, [])


@pytest.mark.parametrize("other", [{"model_type": "olmo2"}, {}], ids=["transformers", "own"])
def test_weights_beside_a_config_are_named(other: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("their").mkdir()
    Path("their/model.safetensors").touch()
    written(LLAMA | other)
    said = capsys.readouterr().out
    folder = Path("their").absolute()
    assert f"# weights: {folder}\n" in said
    assert f"# weights: {folder}\n" in Path("config/tdpp/model/ours.yaml").read_text()
    assert f"  tdpp launch experiment=mine model=ours train.load={folder}\n" in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ('{"model_type": "gpt2", "n_embd": 10, "n_layer": 1, "n_head": 3, "vocab_size": 9}', "model.heads"),
    ],
    ids=["no JSON", "a rule is broken"],
)
def test_nothing_is_written_of_what_is_no_model(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(text)
    assert cli.main(["init", "model", "config.json", "ours"]) == 1
    assert told in capsys.readouterr().err
    assert not Path("config/tdpp/model/ours.yaml").exists()


def test_any_other_family_becomes_a_model_of_transformers(tmp_path: Path) -> None:
    content = {"model_type": "olmo2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    values, (note,) = from_hf(str(tmp_path / "config.json"), {**content, "vocab_size": 99}, 32)
    assert values == {
        **{"family": "huggingface", "layers": 3, "hidden": 64, "heads": 4, "sequence_length": 32, "vocab_size": 99},
        "config": str(tmp_path / "config.json"),
    }
    assert note.startswith("tdpp has no olmo2 of its own: this olmo2 is trained with transformers' own layers")
