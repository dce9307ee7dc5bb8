"""Llamas, Mistrals and Qwens cross to transformers and back: it computes what the engine computes, in shards or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from launch import cli
from megatron_ext import hf
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import part_names
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.stage import Stage
from tests.support import cases
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run

ONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=4")
LLAMA = (
    *("model.num_query_groups=2", "model.ffn_hidden=44", "model.normalization=RMSNorm", "model.norm_epsilon=1e-6"),
    *("model.swiglu=true", "model.position_embedding_type=rope"),
)
GEMMA = ("model.post_norms=true", "model.scale_embedding=true", "model.geglu=true")
MODELS = {
    "llama-2": (*LLAMA, "model.add_bias_linear=false", "model.untie_embeddings_and_output_weights=true"),
    "llama-3": (
        *(*LLAMA, "model.add_bias_linear=false"),
        *("model.rotary_base=500000", "model.rope_scaling_factor=32"),
    ),
    "wide heads": (*LLAMA, "model.add_bias_linear=false", "model.kv_channels=12"),
    "mistral": (*LLAMA, "model.add_bias_linear=false", "model.sliding_window=7"),
    "qwen2": (*LLAMA, "model.add_bias_linear=false", "model.add_qkv_bias=true"),
    "qwen3": (
        *(*LLAMA, "model.add_bias_linear=false", "model.qk_layernorm=true", "model.kv_channels=12"),
        *("model.sliding_window=7", "model.full_attention_every=2"),
    ),
    "gemma2": (
        *(*LLAMA, "model.add_bias_linear=false", *GEMMA, "model.sliding_window=7", "model.full_attention_every=2"),
        *("model.attention_softcap=0.5", "model.logits_softcap=2", "model.query_scalar=5"),
    ),
    "gemma3": (
        *(*LLAMA, "model.add_bias_linear=false", *GEMMA, "model.qk_layernorm=true", "model.kv_channels=12"),
        *("model.sliding_window=40", "model.full_attention_every=2", "model.sliding_rotary_base=100"),
    ),
    "stablelm": (
        *("model.swiglu=true", "model.position_embedding_type=rope", "model.rotary_percent=0.5"),
        *("model.num_query_groups=2", "model.ffn_hidden=44", "model.add_bias_linear=false", "model.add_qkv_bias=true"),
        *("model.rotary_base=500000", "model.rope_scaling_factor=32", "model.untie_embeddings_and_output_weights=true"),
    ),
    "biases": (*LLAMA, "model.num_query_groups=4", "model.untie_embeddings_and_output_weights=true"),
}
TOKENS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineRun]:
    """A run of each model, which tests only read."""

    @cache
    def of(model: str) -> EngineRun:
        folder = tmp_path_factory.mktemp("trained") / "run"
        run = make_run(folder, corpus, *ONE, *MODELS[model], "train.lr=0.05", "train.min_lr=0.05")
        assert run.go() == 0, run.stderr()
        return run

    return of


def whole_model(run: EngineRun) -> Stage:
    """The engine's, with the run's last weights."""
    stage = stage_of(run.plan, 0, TensorGroup())
    weights = run.weights()
    for name, parameter in stage.parameters_by_name():
        block, inner = stage.places[name]
        part = block if "." not in block else f"layer-{int(block.split('.')[1]):05d}"
        parameter.data = weights[f"{part}.{inner}"]
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_is_exported_computes_the_same_in_transformers(
    trained: Callable[[str], EngineRun], tmp_path: Path, model: str
) -> None:
    run = trained(model)
    stage = whole_model(run)
    assert hf.main(["export", str(run.run.path), str(tmp_path / "theirs")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager")
    assert sum(p.numel() for p in theirs.parameters()) == parameter_count(run.plan.model)
    ours, expected = stage({"tokens": TOKENS})["logits"], theirs(TOKENS).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for logits in (ours, expected):
        logits.logsumexp(-1).mean().backward()
    (gradient,) = (one.grad for name, one in stage.parameters_by_name() if name == "layers.0.qkv.weight")
    first = theirs.model.layers[0].self_attn
    parts = [part.weight.grad for part in (first.q_proj, first.k_proj, first.v_proj)]
    torch.testing.assert_close(gradient, torch.cat(parts), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shards"), cases.covering(product(MODELS, (False, True)), set, always=[("llama-3", True)])
)
def test_exported_saved_by_transformers_and_imported_again_it_is_the_same(
    trained: Callable[[str], EngineRun],
    engine_run: Callable[..., EngineRun],
    tmp_path: Path,
    model: str,
    shards: bool,
) -> None:
    run = trained(model)
    assert hf.main(["export", str(run.run.path), str(tmp_path / "ours")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if shards else "5GB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == shards
    assert hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "made")]) == 0
    for part in part_names(3):
        found = safetensors.read(tmp_path / "made" / f"{part}.safetensors")
        for name, tensor in found.items():
            assert torch.equal(tensor, run.state()[name.replace("/", f"/{part}.")]), (part, name)
    going_on = engine_run(*ONE, *MODELS[model], f"train.load={tmp_path / 'made'}", name="going-on")
    assert going_on.go() == 0, going_on.stderr()


def test_what_is_converted_has_the_tokenizer_of_the_model_that_the_run_began_with(
    trained: Callable[[str], EngineRun], engine_run: Callable[..., EngineRun], tmp_path: Path
) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    assert cli.main(["checkpoint", "convert", str(trained("gemma2").run.path), "--to", "huggingface", str(theirs)]) == 0
    assert sorted(path.name for path in theirs.iterdir()) == ["config.json", "model.safetensors"]
    for name in ("tokenizer.json", "generation_config.json"):
        (theirs / name).write_text(name)
    run = engine_run(*ONE, *MODELS["gemma2"], f"train.load={theirs}", name="going-on")
    assert run.go() == 0, run.stderr()
    assert cli.main(["checkpoint", "convert", str(run.run.path), "--to", "huggingface", str(out)]) == 0
    assert {path.name: path.read_text() for path in out.glob("*en*.json")} == {
        name: name for name in ("tokenizer.json", "generation_config.json")
    }


def config_of(folder: Path, **changes: Any) -> Path:
    """A tiny Llama as transformers saves it, with a changed config.json."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act="gelu": tdpp\'s gated MLP uses SiLU'),
        ({"head_dim": 12}, "expected model.layers.0.self_attn.q_proj.weight of shape [48, 32], found [32, 32]"),
        ({"mlp_bias": True}, "mlp_bias=true: all or no linear layers have biases in tdpp"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            'rope_type="yarn": tdpp scales rotary positions only as Llama 3 does',
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must divide hidden_size=32, and be a multiple of"),
        ({"vocab_size": None}, "vocab_size=null: must be a whole number of at least 1"),
        ({"vocab_size": 7}, "expected model.embed_tokens.weight of shape [7, 32], found [61, 32]"),
        ({"num_hidden_layers": 2}, "expected a tensor model.layers.1.input_layernorm.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_llama_that_the_engine_does_not_compute_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert hf.main(["import", str(config_of(tmp_path / "theirs", **changes)), str(tmp_path / "made")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_shorter_sequence_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = config_of(tmp_path / "theirs", max_position_embeddings=131072)
    assert hf.main(["import", str(source), str(tmp_path / "made"), "--sequence-length", "24"]) == 0
    assert "model.sequence_length=24" in capsys.readouterr().out
