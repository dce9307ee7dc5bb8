"""Plans whose stages differ are found where no plan with equal stages has the sizes that were asked for."""

from __future__ import annotations

import math

import pytest

from conf.compose import compose
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.simulation.predict import predict
from fasop.tables.plans import launch_words

NODE = (
    "cluster=a10x8",
    "cluster.groups.gpu2.count=1",
    "cluster.groups.gpu2.gpus_per_node=3",
    "cluster.groups.gpu2.gres=gpu:a10:3",
)
WORDS = (*NODE, "model=small", "train.precision=fp16", "parallel.global_batch_size=7")


def test_two_stages_share_three_gpus() -> None:
    found = best_plans(read([*WORDS, "parallel.pipeline=2"]), Arguments())
    (plan,) = found.plans
    every = best_plans(read(WORDS), Arguments(by_stage=True))
    assert every.looked is not None and found.looked is not None
    assert plan.training.parallel.layout.stages == 2 and plan.training.parallel.layout.world_size == 3
    assert found.looked.least <= plan.total and every.plans[0].total <= plan.total
    assert "No plan with equal stages" in found.summary[0] and not math.isinf(found.looked.least)
    (words,) = launch_words(WORDS, [plan], {})
    assert predict(compose(words)).iteration_s == pytest.approx(plan.total, rel=1e-9)


def test_by_stage_false_has_none_of_them() -> None:
    with pytest.raises(SearchError, match=r"no plan for 3 GPUs has parallel.pipeline=2; possible: pipeline 3"):
        best_plans(read([*WORDS, "parallel.pipeline=2"]), Arguments(by_stage=False))


def test_sizes_that_no_stages_have_are_refused() -> None:
    with pytest.raises(SearchError, match=r"no plan for 3 GPUs has parallel.data=3 parallel.pipeline=2"):
        best_plans(read([*WORDS, "parallel.pipeline=2", "parallel.data=3"]), Arguments())
