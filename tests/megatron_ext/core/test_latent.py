"""Multi-latent attention under engine=megatron_core: every layout learns what one process does.

make test-megatron
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from launch import cli
from tests.support.megatron_ext.engine_run import make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

Learned = tuple[np.ndarray, dict[str, torch.Tensor]]
"""Losses and the checkpoint."""
LATENT = {
    **{"multi_latent_attention": "true", "q_lora_rank": "16", "kv_lora_rank": "12", "qk_head_dim": "8"},
    **{"qk_pos_emb_head_dim": "4", "v_head_dim": "6", "qk_layernorm": "true"},
}
DEEPSEEK = (
    *("engine=megatron_core", "parallel=single", "model.layers=4", "model.normalization=RMSNorm", "model.swiglu=true"),
    *("model.position_embedding_type=rope", "model.add_bias_linear=false", "model.ffn_hidden=48"),
    "model.untie_embeddings_and_output_weights=true",
    *(f"+engine.options.{name}={value}" for name, value in LATENT.items()),
)
LAYOUTS = {
    "context": ("parallel.context=2",),
    "interleaved": ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"),
    "all": (
        *("parallel.context=2", "parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-3"),
        "parallel.sharded_optimizer=true",
    ),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Learned:
    run = make_run(tmp_path_factory.mktemp("one") / "run", corpus, *DEEPSEEK)
    assert run.go() == 0, run.stderr()
    return run.losses(), run.state()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_attention_learns_what_one_process_does(tmp_path: Path, corpus: Path, one: Learned, layout: str) -> None:
    run = make_run(tmp_path / "run", corpus, *DEEPSEEK, *LAYOUTS[layout])
    assert run.go() == 0, run.stderr()
    losses, state = one
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    own = run.state()
    assert own.keys() == state.keys()
    assert any(".latent.kv_down." in name for name in own)
    for name, tensor in state.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")


def test_latent_attention_goes_on_in_another_layout(tmp_path: Path, corpus: Path, one: Learned) -> None:
    run = make_run(tmp_path / "run", corpus, *DEEPSEEK, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    run = run.replan(*DEEPSEEK, *LAYOUTS["all"])
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), one[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["megatron", "huggingface"])
def test_other_programs_formats_have_no_latent_attention(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    run = make_run(tmp_path / "run", corpus, *DEEPSEEK)
    assert cli.main(["checkpoint", "convert", str(run.run.path), str(tmp_path / "out"), "--to", to]) == 1
    said = capsys.readouterr().err
    assert f"--to {to}: run test_other_programs" in said
    assert "multi_latent_attention=true, of which that layout has no weights; use --to tdpp" in said
    assert not (tmp_path / "out").exists()


def test_queries_may_be_projected_at_once(tmp_path: Path, corpus: Path, one: Learned) -> None:
    run = make_run(tmp_path / "run", corpus, *DEEPSEEK, "++engine.options.q_lora_rank=null")
    assert run.go() == 0, run.stderr()
    assert "weights/layer-00000.latent.query.weight" in run.state()
