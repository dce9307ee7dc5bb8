"""The number format in which replicas sum gradients: a key of plans with several of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

WORDS = ("model=tiny", "parallel=single", "parallel.data=2", "parallel.global_batch_size=8", "data.prefix=data/none")
BF16 = "parallel.reduce_dtype=bf16"


def plan_of(*words: str) -> dict[str, object]:
    return make_plan(compose([*WORDS, *words]), "test/reduce-dtype").as_json()


def test_a_plan_says_the_format_where_it_is_not_fp32() -> None:
    content = plan_of(BF16)
    assert content["reduce_dtype"] == "bf16"
    assert Plan.parse(content, Path()).reduce_dtype == "bf16"
    assert "reduce_dtype" not in plan_of("parallel.reduce_dtype=fp32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [
                "engine=megatron_lm",
                "engine.checkout=/opt/megatron-lm",
                "cluster=a10x8",
                "parallel.data=32",
                "parallel.global_batch_size=64",
                BF16,
            ],
            r"parallel\.reduce_dtype=bf16: Megatron-LM .*; use parallel\.reduce_dtype=fp32 and "
            r"engine\.arguments=\[--grad-reduce-in-bf16\], or engine=tdpp",
        ),
        (["parallel.reduce_dtype=fp16"], r"parallel\.reduce_dtype.*fp16.*fp32, bf16"),
    ],
    ids=["megatron_lm", "fp16"],
)
def test_where_it_means_nothing_it_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose([*WORDS, *words])
    assert len(str(caught.value).splitlines()) == 1


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanFault, match=r"reduce_dtype=.fp16. must be one of fp32, bf16"):
        Plan.parse({**plan_of(BF16), "reduce_dtype": "fp16"}, Path())
