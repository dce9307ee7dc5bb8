"""What only a GPT can have, biases of queries, their norms and sliding windows, trains alike under every layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.families.gpt.options import GptOptions, window_of
from megatron_ext.families.tasks import task_of
from tests.support.megatron_ext.engine_run import TINY, make_run
from tests.support.megatron_ext.known_sizes import assert_sizes_known

ROPE = "model.position_embedding_type=rope"
BASE = "model.sliding_rotary_base=100"
MODELS = {
    "stablelm": ("model.normalization=LayerNorm", "model.rotary_percent=0.25"),
    "qwen2": ("model.add_qkv_bias=true",),
    "gemma2": (
        *("model.post_norms=true", "model.scale_embedding=true", "model.geglu=true", "model.query_scalar=5"),
        *("model.attention_softcap=0.5", "model.logits_softcap=2", "model.attention_dropout=0.1"),
    ),
    "qwen3 with windows": ("model.qk_layernorm=true", "model.sliding_window=7", "model.full_attention_every=2", BASE),
}
COMMON = (
    *("model.add_bias_linear=false", "model.normalization=RMSNorm", "model.position_embedding_type=rope"),
    *("model.swiglu=true", "model.num_query_groups=2", "train.min_lr=1e-3", "parallel.micro_batch_size=2"),
)
UNEVEN = (
    *("parallel.pipeline=2", "parallel.partition=1-2", "parallel.data=2", "parallel.shares=3-1"),
    *("parallel.recompute=full", "train.iterations=2"),
)
TENSOR = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=2-1")


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_in_one_process(model: str, sequence_parallel: bool, tmp_path: Path, corpus: Path) -> None:
    words = (*COMMON, *MODELS[model])
    one = make_run(tmp_path / "one", corpus, *words, "parallel=single")
    assert one.go() == 0, one.stderr()
    many = make_run(tmp_path / "many", corpus, *words, *UNEVEN)
    assert many.go() == 0, many.stderr()
    rest = many.replan(*words, *TENSOR, f"parallel.sequence_parallel={str(sequence_parallel).lower()}")
    assert rest.go() == 0, rest.stderr()
    assert rest.losses() == pytest.approx(one.losses(), abs=1e-5)
    for name, tensor in one.weights().items():
        torch.testing.assert_close(rest.weights()[name], tensor, rtol=0, atol=1e-5)
    task = task_of(one.plan)
    assert_sizes_known(task, one.plan.model)
    assert parameter_count(one.plan.model) == sum(tensor.numel() for tensor in one.weights().values())


@pytest.mark.parametrize(
    ("window", "every", "expected"),
    [(None, None, [None] * 4), (3, None, [3] * 4), (3, 2, [3, None, 3, None]), (24, 2, [None] * 4)],
)
def test_a_layer_has_a_window(window: int | None, every: int | None, expected: list[int | None]) -> None:
    own = GptOptions(sliding_window=window, full_attention_every=every)
    assert [window_of(own, layer, 24) for layer in range(4)] == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model.full_attention_every=2",), "model.full_attention_every=2 says nothing without model.sliding_window"),
        (
            (ROPE, "model.sliding_rotary_base=9"),
            "model.sliding_rotary_base=9 says nothing without model.sliding_window",
        ),
        (("model.sliding_rotary_base=9", "model.sliding_window=8"), "is only for model.position_embedding_type=rope"),
        (("model.geglu=true",), "model.geglu=true says nothing without model.swiglu=true"),
        (
            ("model.attention_softcap=50", "engine=megatron_core"),
            "model.attention_softcap=50.0 must be null with engine=megatron_core; use engine=tdpp",
        ),
        (("model.sliding_window=8", "model.family=bert"), "model.sliding_window=8 is only for model.family=gpt"),
        (("model.rotary_percent=0.5",), "model.rotary_percent=0.5 is only for model.position_embedding_type=rope"),
        (
            (ROPE, "model.rotary_percent=0.4"),
            "model.rotary_percent=0.4 rotates 3 of a head's 8 numbers",
        ),
        (
            ("model.qk_layernorm=true", "engine=megatron_core"),
            "model.qk_layernorm=true must be false with engine=megatron_core; use engine=tdpp",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        compose([*TINY, *words])
