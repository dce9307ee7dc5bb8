"""Replicas that take unequal numbers of micro-batches train the model of a plain single-process loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.contract.schedule.schedules import NAMES
from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, Layout, assert_equal, options
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

MICRO_BATCHES, SIZE, REPLICAS = 6, 2, 3
COMPOSITIONS = [(a, b, MICRO_BATCHES - a - b) for a in range(1, MICRO_BATCHES - 1) for b in range(1, MICRO_BATCHES - a)]
"""Every way to share the micro-batches out."""
PARTITIONS = {1: "3", 2: "1-2"}
BATCH = [f"parallel.global_batch_size={MICRO_BATCHES * SIZE}", *DROPOUT]
ONE = ["parallel.data=1", "parallel.pipeline=1", f"parallel.micro_batch_size={MICRO_BATCHES * SIZE}"]

Shared = tuple[tuple[int, ...], Layout]
CASES: list[Shared] = [
    *(
        (shares, Layout(1, REPLICAS, stages, PARTITIONS[stages], SIZE, schedule=schedule))
        for shares, schedule, stages in zip(COMPOSITIONS, cycle(NAMES[:2] + NAMES[3:]), cycle((2, 1, 2)), strict=False)
    ),
    ((1, 2, 3), Layout(1, REPLICAS, 2, "1-0-1-1", SIZE, schedule="interleaved", chunks=2)),
    ((4, 1, 1), Layout(1, REPLICAS, 2, "1-1-1-0", SIZE, recompute="full", schedule="interleaved", chunks=2)),
    ((1, 5), Layout(2, 2, 2, "2-1", SIZE, True, "full", True, schedule="zb_h1")),
    ((4, 2), Layout(2, 2, 2, "0-3", SIZE, True, sharded_optimizer=True)),
    ((5, 1), Layout(1, 2, 3, "1-0-2", SIZE, sharded_optimizer=True, schedule="gpipe")),
    ((9, 3), Layout(1, 2, 2, "2-1", 1)),
]
TRIED = cases.covering(
    CASES, lambda case: {*options(case[1]), (len(case[0]), case[0].index(max(case[0]))), ("least", min(case[0]))}
)


def overrides(case: Shared) -> list[str]:
    shares, layout = case
    of_layout = (f"parallel.{key}={value}" for key, value in layout._asdict().items())
    return [*BATCH, *of_layout, f"parallel.shares={'-'.join(map(str, shares))}"]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    return textbook(make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *BATCH, *ONE).plan, corpus)


@pytest.mark.parametrize("case", TRIED, ids=lambda case: f"{'-'.join(map(str, case[0]))}-of-{case[1]}")
def test_losses_weights_and_moments_equal_the_single_process(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    case: Shared,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    run = engine_run(*overrides(case))
    assert run.plan.micro_batches == list(case[0])
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)


def test_a_run_goes_on_with_other_shares(
    engine_run: Callable[..., EngineRun], reference: tuple[np.ndarray, dict[str, torch.Tensor]]
) -> None:
    first = overrides(((4, 1, 1), Layout(1, REPLICAS, 1, "3", SIZE)))
    run = engine_run(*first, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    then = run.replan(*overrides(((1, 5), Layout(1, 2, 2, "2-1", SIZE))))
    assert then.go() == 0, then.stderr()
    assert_equal(then, reference)


def test_equal_shares_are_the_even_plan(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*BATCH, "parallel.pipeline=1", "parallel.data=3", "parallel.micro_batch_size=2")
    same = engine_run(
        *BATCH,
        "parallel.pipeline=1",
        "parallel.data=3",
        "parallel.micro_batch_size=2",
        "parallel.shares=7*3",
        name="same",
    )
    assert same.plan.as_json() == {**run.plan.as_json(), "run": same.plan.run}
    assert same.plan.as_json()["version"] == 1
