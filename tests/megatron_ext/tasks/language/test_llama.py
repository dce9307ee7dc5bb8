"""Options beside GPT-2's: a Llama computes what transformers' computes, counts what the published ones have, and trains
under every layout as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from conf.compose import compose
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.positions import rotary
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

LLAMA = [
    *("model.heads=4", "model.num_query_groups=2", "model.ffn_hidden=44", "model.normalization=RMSNorm"),
    *("model.swiglu=true", "model.position_embedding_type=rope", "model.add_bias_linear=false"),
    *("model.untie_embeddings_and_output_weights=true", "model.norm_epsilon=1e-6"),
]
ONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=8"]
OPTIONS = {
    "llama": LLAMA,
    "tied": [*LLAMA, "model.untie_embeddings_and_output_weights=false", "model.rope_scaling_factor=8"],
    "one-group": ["model.num_query_groups=1", "model.position_embedding_type=none"],
    "rms-with-bias": [
        *("model.normalization=RMSNorm", "model.swiglu=true", "model.ffn_hidden=40"),
        *("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    ],
}
LAYOUTS = {
    "llama": [
        "parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 parallel.micro_batch_size=1",
        "parallel.tensor=2 parallel.data=2 parallel.pipeline=2 parallel.partition=0-3 parallel.micro_batch_size=2 "
        "parallel.sequence_parallel=true parallel.recompute=full parallel.sharded_optimizer=true",
        "parallel.data=1 parallel.pipeline=3 parallel.partition=2-1-0 parallel.schedule=zb_h1 "
        "parallel.micro_batch_size=2",
        "parallel.tensor=2 parallel.data=1 parallel.pipeline=2 parallel.chunks=2 parallel.schedule=interleaved "
        "parallel.partition=1-0-1-1 parallel.micro_batch_size=1 parallel.recompute=selective",
    ],
    "tied": [
        "parallel.tensor=2 parallel.data=1 parallel.pipeline=2 parallel.partition=2-1 parallel.micro_batch_size=2"
    ],
    "one-group": ["parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 parallel.micro_batch_size=2"],
    "rms-with-bias": [
        "parallel.tensor=4 parallel.data=1 parallel.pipeline=1 parallel.partition=3 parallel.micro_batch_size=4 "
        "parallel.sequence_parallel=true"
    ],
}


def theirs(config: ModelConfig) -> Any:
    """transformers' model of this size."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(  # type: ignore[call-arg]
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.inner,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.query_groups,
            max_position_embeddings=config.sequence_length,
            rms_norm_eps=config.norm_epsilon,
            rope_theta=config.rotary_base,
            tie_word_embeddings=not config.untie_embeddings_and_output_weights,
            attention_bias=False,
            **({} if config.rope_scaling_factor is None else {"rope_scaling": scaling}),
        )
    )


@torch.no_grad()
def give(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Our weights to transformers' model."""
    own = dict(model.named_parameters())
    for name, tensor in own.items():
        if name.endswith("embed_tokens.weight"):
            tensor.copy_(weights["embedding.word"])
        elif name == "lm_head.weight":
            tensor.copy_(weights["head.word"])
        elif name == "model.norm.weight":
            tensor.copy_(weights["head.norm.weight"])
        else:
            _, _, layer, *rest, kind = name.removesuffix(".weight").split(".")
            assert rest or kind
            tensor.copy_(part_of(weights, f"layers.{layer}", kind, own, name))


def part_of(
    weights: dict[str, torch.Tensor], layer: str, kind: str, own: dict[str, nn.Parameter], name: str
) -> torch.Tensor:
    simple = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "o_proj": "attention_out",
        "down_proj": "mlp_out",
    }
    if kind in simple:
        return weights[f"{layer}.{simple[kind]}.weight"]
    together = ["q_proj", "k_proj", "v_proj"] if kind in ("q_proj", "k_proj", "v_proj") else ["gate_proj", "up_proj"]
    lengths = [len(own[name.replace(kind, other)]) for other in together]
    fused = weights[f"{layer}.{'qkv' if len(together) == 3 else 'mlp_in'}.weight"]
    return fused.split(lengths)[together.index(kind)]


@pytest.mark.parametrize("options", ["llama", "tied"])
def test_logits_equal_transformers(engine_run: Callable[..., EngineRun], options: str) -> None:
    plan = engine_run(*ONE, *OPTIONS[options]).plan
    stage = stage_of(plan, 0, TensorGroup())
    for _, parameter in stage.parameters_by_name():
        nn.init.normal_(parameter, std=0.3)
    model = theirs(plan.model)
    give(dict(stage.parameters_by_name()), model)
    tokens = torch.randint(VOCAB, (2, plan.model.sequence_length), generator=torch.Generator().manual_seed(1))
    ours = stage({"tokens": tokens})["logits"]
    torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(plan.model)


def test_long_waves_are_stretched_and_short_ones_are_not() -> None:
    sizes = {"layers": 1, "hidden": 128, "heads": 1, "sequence_length": 4, "vocab_size": 1, "padded_vocab_size": 1}
    plain = ModelConfig(**sizes, position_embedding_type="rope", rotary_base=500000.0)
    scaled = ModelConfig(**sizes, position_embedding_type="rope", rotary_base=500000.0, rope_scaling_factor=8.0)
    found = [rotary(config, 2, torch.device("cpu"), torch.float32) for config in (plain, scaled)]
    angle, stretched = (sine[1].asin() for _, sine in found)
    ratio = angle / stretched
    assert ratio[0] == 1.0
    assert ratio[63].item() == pytest.approx(8.0, rel=1e-3)
    assert bool((ratio[:64].diff() >= -1e-3).all())


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("llama-13b", 13_015_864_320),
        ("llama-70b", 70_553_706_496),
        ("xl", 1_557_611_200),
    ],
)
def test_sizes_have_the_parameters_that_are_published(model: str, parameters: int) -> None:
    assert compose([f"model={model}", "parallel.partition=null"]).model.parameters() == parameters


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], np.ndarray]:
    """Losses of a textbook loop over one module, by options."""
    found: dict[str, np.ndarray] = {}

    def losses(options: str) -> np.ndarray:
        if options not in found:
            run = make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *ONE, *OPTIONS[options])
            found[options], _ = textbook(run.plan, corpus)
        return found[options]

    return losses


@pytest.mark.parametrize(
    ("options", "layout"), [(options, layout) for options, layouts in LAYOUTS.items() for layout in layouts]
)
def test_every_layout_trains_as_one_process(
    engine_run: Callable[..., EngineRun], reference: Callable[[str], np.ndarray], options: str, layout: str
) -> None:
    run = engine_run(*OPTIONS[options], *layout.split())
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), reference(options), rtol=0, atol=1e-5)


def test_a_run_goes_on_under_another_layout_and_not_with_another_model(engine_run: Callable[..., EngineRun]) -> None:
    whole = engine_run(*LLAMA, *LAYOUTS["llama"][0].split())
    assert whole.go() == 0, whole.stderr()
    part = engine_run(*LLAMA, *LAYOUTS["llama"][0].split(), "train.iterations=2", name="part")
    assert part.go() == 0, part.stderr()
    rest = part.replan(*LLAMA, *LAYOUTS["llama"][1].split())
    assert rest.go() == 0, rest.stderr()
    np.testing.assert_allclose(rest.losses(), whole.losses(), rtol=0, atol=1e-5)
    other = part.replan(*LLAMA, "model.rotary_base=500000", *LAYOUTS["llama"][0].split(), "train.iterations=6")
    assert other.go() == 1
    assert "a checkpoint of another model: expected rotary_base=500000.0; found rotary_base=None" in other.stderr()
