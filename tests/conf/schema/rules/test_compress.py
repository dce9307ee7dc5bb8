"""In which form activations go from stage to stage: a key of plans with several of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

WORDS = (
    "model=tiny",
    "parallel=single",
    "parallel.pipeline=2",
    "parallel.global_batch_size=8",
    "data.prefix=data/none",
)
INT8 = "parallel.compress=int8"


def plan_of(*words: str) -> dict[str, object]:
    return make_plan(compose([*WORDS, "parallel.partition=2-2", *words]), "test/compress").as_json()


def test_a_plan_says_the_form_where_there_is_one() -> None:
    content = plan_of(INT8)
    assert content["compress"] == "int8"
    assert Plan.parse(content, Path()).compress == "int8"
    assert "compress" not in plan_of("parallel.compress=none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["engine=megatron_lm", "engine.checkout=/opt/megatron-lm", "cluster=a10x8", "parallel.data=16", INT8],
            r"parallel\.compress=int8: Megatron-LM .*; use parallel\.compress=none, or engine=tdpp",
        ),
        (["parallel.compress=int4"], r"parallel\.compress.*int4.*none, int8"),
    ],
    ids=["megatron_lm", "int4"],
)
def test_where_it_means_nothing_it_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose([*WORDS, "parallel.global_batch_size=32", *words])
    assert len(str(caught.value).splitlines()) == 1


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanFault, match=r"compress=.fp4. must be one of none, int8"):
        Plan.parse({**plan_of(INT8), "compress": "fp4"}, Path())
