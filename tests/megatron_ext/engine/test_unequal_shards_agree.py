"""Replicas that keep parts of unlike size of weights, gradients and optimizer train as one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.contract.plan import Plan
from tests.megatron_ext.engine.optimizer.test_optimizers_agree import assert_equal
from tests.megatron_ext.engine.test_zero_agrees import (
    CASES,
    GATHERED_CASES,
    Found,
    of_reference,
    reference,
    small_buckets,
)
from tests.support.megatron_ext.engine_run import EngineRun

__all__ = ["reference", "small_buckets"]
PARTS = (3, 10, 1, 5)
"""Of a 24 GiB and an 80 GiB GPU, and of others."""
THREE = ["parallel.data=3", "parallel.pipeline=1", "parallel.micro_batch_size=2", "parallel.global_batch_size=24"]


def with_shards(run: EngineRun) -> EngineRun:
    """The same run, whose replicas keep unlike parts, other ones in each stage."""
    content, replicas = run.plan.as_json(), run.plan.layout.replicas
    shards = [[*PARTS[:count]][:: 1 if stage % 2 else -1] for stage, count in enumerate(replicas)]
    run.run.write_json(run.run.plan, {**content, "shards": shards})
    return EngineRun(run.run, Plan.read(run.run.plan))


MORE = {"three": THREE, "lamb": GATHERED_CASES["lamb"], "offloaded-both": GATHERED_CASES["offloaded-both"]}
QUICK = ("replicas", "four", "stages", "tensor", "three", "lamb", "zb_h1", "offloaded", "interleaved")
LAYOUTS = [
    pytest.param(
        words,
        zero,
        id=f"{name}-{zero}",
        marks=() if name in QUICK and (zero == 3 or name == "stages") else pytest.mark.slow,
    )
    for zero, cases in ((1, CASES | MORE), (2, CASES | MORE), (3, GATHERED_CASES))
    for name, words in cases.items()
]


@pytest.mark.parametrize(("words", "zero"), LAYOUTS)
def test_every_layout_equals_the_textbook(
    words: list[str], zero: int, reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = with_shards(engine_run(*words, f"parallel.zero={zero}"))
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*of_reference(words)), 1e-5, 1e-5)
