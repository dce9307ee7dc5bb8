"""Samples of alike length together: a key of models that translate, which a plan has where it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

WORDS = ("model=transformer-tiny", "parallel=single", "parallel.micro_batch_size=2", "data.prefix=data/none")


def plan_of(*words: str) -> dict[str, object]:
    return make_plan(compose([*WORDS, *words]), "test/bucketing").as_json()


def test_a_plan_says_how_many_batches_are_sorted_and_nothing_where_none_are() -> None:
    content = plan_of("data.bucketing=80")
    assert content["data_bucketing"] == 80
    assert Plan.parse(content, Path()).data_bucketing == 80
    assert "data_bucketing" not in plan_of()


@pytest.mark.parametrize("family", ["tiny", "bert-tiny", "t5-tiny", "vit-tiny"])
def test_other_models_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.bucketing=80 is for translation.*; leave it out") as caught:
        compose([f"model={family}", *WORDS[1:], "data.bucketing=80"])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", ["0", "-3", "10001", "x"])
def test_what_is_no_number_of_batches_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.bucketing"):
        plan_of(f"data.bucketing={value}")


def test_a_plan_that_cannot_be_is_refused() -> None:
    content = plan_of("data.bucketing=80")
    with pytest.raises(PlanFault, match="data_bucketing=0 must be at least 1"):
        Plan.parse({**content, "data_bucketing": 0}, Path())
    other = make_plan(compose(["model=tiny", *WORDS[1:]]), "test/other").as_json()
    with pytest.raises(PlanFault, match=r"data_bucketing=80 must be null with model\.family=gpt"):
        Plan.parse({**other, "data_bucketing": 80}, Path())
