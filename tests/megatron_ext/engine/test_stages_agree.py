"""Stages with unlike numbers of replicas, and with tensor groups of unlike sizes, train the model of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_ext.engine import engine
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, assert_equal
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

SAMPLES = 12
BATCH = [f"parallel.global_batch_size={SAMPLES}", *DROPOUT]
ONE = ["parallel.data=1", "parallel.pipeline=1", f"parallel.micro_batch_size={SAMPLES}"]


class Case(NamedTuple):
    """The sizes of each stage, and overrides."""

    partition: str
    tensor: str = "1"
    replicas: str | None = None
    micro_batch_size: int = 2
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = "".join(f"-{one.rpartition('.')[2]}" for one in self.others)
        return f"{self.partition}-tensor-{self.tensor}-replicas-{self.replicas}{others}"

    def overrides(self) -> list[str]:
        virtual = self.partition.count("-") + 1
        chunks = next((int(one.partition("=")[2]) for one in self.others if "chunks" in one), 1)
        sizes = {
            "pipeline": virtual // chunks,
            "partition": self.partition,
            "tensor": self.tensor,
            "replicas": self.replicas or "null",
            "micro_batch_size": self.micro_batch_size,
        }
        return [*BATCH, *(f"parallel.{key}={value}" for key, value in sizes.items()), *self.others]


SHARDED, SEQUENCE = "parallel.sharded_optimizer=true", "parallel.sequence_parallel=true"
FULL, GPIPE, ZERO_BUBBLE = "parallel.recompute=full", "parallel.schedule=gpipe", "parallel.schedule=zb_h1"
REPLICAS = [
    Case("2-1", replicas="2-1"),
    Case("1-2", replicas="1-2", others=(SHARDED,)),
    Case("2-1", replicas="3-1", micro_batch_size=1, others=(FULL,)),
    Case("1-1-1", replicas="1-3-1", others=(ZERO_BUBBLE,)),
    Case("1-0-2", replicas="2-2-1", others=(GPIPE, SHARDED)),
    Case("0-3-0", replicas="2-3-2"),
    Case("3-0", replicas="4-1", micro_batch_size=1, others=(ZERO_BUBBLE,)),
    Case("1-1-0-1", replicas="1-2-3-1", micro_batch_size=1, others=(FULL, ZERO_BUBBLE, SHARDED)),
]
TENSOR = [
    Case("2-1", "2-1", others=("parallel.data=1",)),
    Case("1-2", "1-2", others=("parallel.data=2", SEQUENCE)),
    Case("1-1-1", "4-2-1", others=("parallel.data=1", SEQUENCE, SHARDED)),
    Case("1-0-2", "1-4-2", others=("parallel.data=1", ZERO_BUBBLE, FULL)),
    Case("0-3-0", "2-1-4", others=("parallel.data=1", SEQUENCE, ZERO_BUBBLE)),
    Case("1-0-1-1", "2-1", others=("parallel.data=1", "parallel.chunks=2", "parallel.schedule=interleaved", SEQUENCE)),
    Case("0-2-0-1", "1-2", others=("parallel.data=2", "parallel.chunks=2", "parallel.schedule=interleaved")),
]
BOTH = [
    Case("2-1", "2-1", "1-2", others=(SEQUENCE, SHARDED)),
    Case("1-1-1", "1-2-1", "3-1-2", others=(SEQUENCE,)),
    Case("1-2", "4-1", "1-3", others=(ZERO_BUBBLE, FULL)),
    Case("2-1", "2-1", others=("parallel.data=2", "parallel.shares=2-1", SEQUENCE)),
    Case("1-1-1", "1-2-1", others=("parallel.data=2", "parallel.shares=1-5", SHARDED)),
]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    return textbook(make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *BATCH, *ONE).plan, corpus)


def options(case: Case) -> set[object]:
    """Sizes that grow and that shrink from stage to stage, and every other option beside them."""
    sizes = [map(int, (given or "1").split("-")) for given in (case.tensor, case.replicas)]
    steps = [[(b > a) - (b < a) for a, b in pairwise(each)] for each in sizes]
    unlike = tuple(any(each) for each in steps)
    return {(number, step) for number, each in enumerate(steps) for step in each} | {
        (unlike, other) for other in case.others
    }


@pytest.mark.parametrize("case", cases.covering([*REPLICAS, *TENSOR, *BOTH], options), ids=str)
def test_losses_weights_and_moments_equal_the_single_process(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    run = engine_run(*case.overrides())
    assert run.plan.as_json()["version"] == 2
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)


def test_a_run_goes_on_with_other_stages(
    engine_run: Callable[..., EngineRun], reference: tuple[np.ndarray, dict[str, torch.Tensor]]
) -> None:
    run = engine_run(*BOTH[0].overrides(), "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    then = run.replan(*REPLICAS[3].overrides())
    assert then.go() == 0, then.stderr()
    assert_equal(then, reference)


def test_stages_that_are_alike_are_the_even_plan(engine_run: Callable[..., EngineRun]) -> None:
    common = [*BATCH, "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2"]
    run = engine_run(*common, "parallel.tensor=2", "parallel.data=3")
    same = engine_run(*common, "parallel.tensor=2-2", "parallel.replicas=3*2", name="same")
    assert same.plan.as_json() == {**run.plan.as_json(), "run": same.plan.run}
    assert same.plan.as_json()["version"] == 1
