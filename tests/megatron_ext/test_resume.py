"""A run that is interrupted and resumed, under whatever layout, trains as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint import Checkpoint
from megatron_ext.engine import Engine, StepResult
from tests.megatron_ext.engine_run import EngineRun, make_run

ITERATIONS = 9
WHOLE = (
    f"train.iterations={ITERATIONS}",
    "train.save_interval=2",
    "parallel.data=2",
    "parallel.pipeline=2",
    "parallel.partition=1-2",
    "parallel.micro_batch_size=2",
)
LAYOUTS = {
    "same": (),
    "partition": ("parallel.partition=3-0",),
    "one-rank": ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3"),
    "data": ("parallel.data=4", "parallel.micro_batch_size=1"),
    "tensor": ("parallel.data=1", "parallel.tensor=2"),
    "pipeline": ("parallel.data=1", "parallel.pipeline=4", "parallel.partition=0-1-2-0"),
    "chunks": ("parallel.data=1", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-0-1"),
    "sharded-optimizer": ("parallel.sharded_optimizer=true",),
    "micro-batch": ("parallel.micro_batch_size=1",),
    "all-at-once": (
        "parallel.tensor=2",
        "parallel.data=2",
        "parallel.pipeline=1",
        "parallel.partition=3",
        "parallel.sharded_optimizer=true",
        "parallel.sequence_parallel=true",
    ),
}


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    run = make_run(tmp_path_factory.mktemp("uninterrupted") / "run", corpus, *WHOLE)
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Has one rank of the following runs die, as if its node lost power, when it begins an iteration."""

    def arm(rank: int, fatal: int) -> None:
        step = Engine.step

        def until(self: Engine, iteration: int) -> StepResult:
            if iteration == fatal and self._place.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, iteration)

        monkeypatch.setattr(Engine, "step", until)

    yield arm
    monkeypatch.undo()


def assert_same(found: EngineRun, expected: EngineRun, tolerance: float) -> None:
    assert [line["iteration"] for line in found.metrics()] == list(range(1, expected.plan.train.iterations + 1))
    assert [line["consumed_samples"] for line in found.metrics()] == [
        line["consumed_samples"] for line in expected.metrics()
    ]
    np.testing.assert_allclose(found.losses(), expected.losses(), rtol=0, atol=tolerance)
    state = expected.state()
    assert found.state().keys() == state.keys()
    for name, tensor in found.state().items():
        torch.testing.assert_close(
            tensor, state[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [*(("same", after) for after in LAYOUTS), ("all-at-once", "same"), ("all-at-once", "chunks")],
    ids=lambda layout: layout,
)
def test_killed_at_a_random_iteration_and_resumed_under_another_layout_it_trains_the_same(
    engine_run: Callable[..., EngineRun],
    uninterrupted: EngineRun,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: Callable[[int, int], None],
    before: str,
    after: str,
) -> None:
    where = random.Random(f"{before} {after}")
    run = engine_run(*WHOLE, *LAYOUTS[before])
    killed_at(where.randrange(run.plan.world_size), where.randint(3, ITERATIONS))
    assert run.go() == 1
    assert [error["type"] for error in run.errors() if not error["symptom"]] == ["Killed"]
    assert 2 <= Checkpoint.at(run.run.path).meta.iteration < ITERATIONS
    monkeypatch.undo()
    resumed = run.replan(*WHOLE, *LAYOUTS[after])
    assert resumed.go() == 0, resumed.stderr()
    assert not [error for error in resumed.errors() if error["rank"] < resumed.plan.world_size]
    assert_same(resumed, uninterrupted, 0.0 if before == after == "same" else 1e-5)
