"""Experts under engine=megatron_core: every layout learns what one process does.

make test-megatron
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.megatron_ext.engine_run import make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

Learned = tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]
"""Losses of training and evaluation, and the checkpoint."""
MIXTRAL = (
    *("engine=megatron_core", "parallel=single", "model.layers=4", "model.normalization=RMSNorm", "model.swiglu=true"),
    *("model.position_embedding_type=rope", "model.add_bias_linear=false", "model.num_query_groups=2"),
    *("model.untie_embeddings_and_output_weights=true", "model.ffn_hidden=48", "model.experts=4"),
    *("train.iterations=4", "train.eval_interval=3", 'data.split="80,20,0"'),
)
LAYOUTS = {
    "pipeline": ("parallel.pipeline=2", "parallel.partition=1-3"),
    "data": ("parallel.data=2",),
    "expert": ("parallel.data=2", "parallel.expert=2"),
    "expert of four": ("parallel.data=4", "parallel.expert=2", "parallel.sharded_optimizer=true"),
    "tensor": ("parallel.tensor=2", "parallel.sequence_parallel=true"),
    "tensor and expert": (
        *("parallel.data=2", "parallel.expert=2", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    ),
    "all": ("parallel.data=2", "parallel.expert=2", "parallel.pipeline=2", "parallel.sharded_optimizer=true"),
    "context": ("parallel.context=2",),
    "context and expert": ("parallel.context=2", "parallel.data=2", "parallel.expert=4"),
    "interleaved": (
        *("parallel.data=2", "parallel.expert=2", "parallel.pipeline=2", "parallel.schedule=interleaved"),
        "parallel.chunks=2",
    ),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Learned:
    run = make_run(tmp_path_factory.mktemp("one") / "run", corpus, *MIXTRAL)
    assert run.go() == 0, run.stderr()
    return [(line["loss"], line.get("valid_loss", 0.0)) for line in run.metrics()], run.state()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_learn_what_one_process_does(tmp_path: Path, corpus: Path, one: Learned, layout: str) -> None:
    run = make_run(tmp_path / "run", corpus, *MIXTRAL, *LAYOUTS[layout])
    assert run.go() == 0, run.stderr()
    losses, state = one
    found = [(line["loss"], line.get("valid_loss", 0.0)) for line in run.metrics()]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    own = run.state()
    assert own.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")


def test_experts_go_on_in_another_layout(tmp_path: Path, corpus: Path, one: Learned) -> None:
    run = make_run(tmp_path / "run", corpus, *MIXTRAL, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    run = run.replan(*MIXTRAL, *LAYOUTS["all"])
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), [loss for loss, _ in one[0]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "message"),
    {
        "a wrong name": ("+engine.options.moe_aux_loss_coef=0.1", "no such option; did you mean moe_aux_loss_coeff?"),
        "a key of tdpp": (
            "+engine.options.hidden_size=64",
            "the plan says hidden_size=32, from keys of tdpp",
        ),
        "FP8": (
            "+engine.options.fp8=hybrid",
            "fp8=hybrid needs a GPU and Transformer Engine, which is not here; leave",
        ),
        "a name of no balance": (
            "+engine.options.moe_router_load_balancing_type=aux",
            "moe_router_load_balancing_type=aux must be aux_loss or seq_aux_loss or global_aux_loss or sinkhorn",
        ),
        "what would go unheard": ("+engine.options.window_size=[4,0]", "needs Transformer Engine, which is not here"),
        "what no model has": (
            "+engine.options.mtp_num_layers=1",
            "mtp_num_layers=1: the plan says mtp_num_layers=None",
        ),
        "what a layer refuses": (
            "+engine.options.enable_cuda_graph=true",
            "megatron-core refuses engine.options.enable_cuda_graph=True: RNG tracker",
        ),
        "another type": ("+engine.options.qk_layernorm=3", "engine.options.qk_layernorm=3 must be of the type bool"),
        "another type than an optional number": (
            "+engine.options.moe_z_loss_coeff=much",
            "engine.options.moe_z_loss_coeff=much must be of the type float or null",
        ),
        "a word that it does not know": (
            "+engine.options.moe_router_score_function=softplus",
            "moe_router_score_function=softplus must be of the type softmax or sigmoid",
        ),
        "a name of an Enum": (
            "+engine.options.attention_backend=flush",
            "attention_backend=flush must be of the type flash or fused or unfused or local or auto",
        ),
        "a field of latent attention": (
            "+engine.options.kv_lora_rank=12",
            "engine.options.kv_lora_rank=12 needs engine.options.multi_latent_attention=true",
        ),
        "a contradiction": ("+engine.options.moe_pad_expert_input_to_capacity=true", "megatron-core refuses"),
    }.values(),
)
def test_an_option_that_megatron_core_does_not_take_is_one_message(
    tmp_path: Path, corpus: Path, option: str, message: str
) -> None:
    run = make_run(tmp_path / "run", corpus, *MIXTRAL, option)
    assert run.go() == 1
    assert message in run.errors()[0]["message"], run.stderr()


def test_an_option_changes_what_is_learned(tmp_path: Path, corpus: Path, one: Learned) -> None:
    run = make_run(tmp_path / "run", corpus, *MIXTRAL, "+engine.options.moe_aux_loss_coeff=10.0")
    assert run.go() == 0, run.stderr()
    assert abs(run.losses()[-1] - one[0][-1][0]) > 1e-4
