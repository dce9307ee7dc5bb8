"""A log line is of all iterations since the one before, and of nothing else."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from conf.run_folder.log_lines import iteration_line
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.log import TrainingLog, Unlogged
from megatron_ext.engine.results import Progress, StepResult, not_finite
from tests.support.megatron_ext.engine_run import EngineRun


def test_a_line_has_the_means_and_counts_since_the_last_one(
    engine_run: Callable[..., EngineRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = engine_run("train.iterations=7", "train.log_interval=3", "parallel.global_batch_size=8")
    now = 100.0
    log = TrainingLog(run.plan, run.run.metrics, clock=lambda: now)
    steps = [(1.0, None), (2.0, 5.0), (4.0, 4.0), (8.0, 3.0), (8.0, 2.0), (8.0, 1.0), (3.0, 0.5)]
    for number, (seconds, loss) in enumerate(steps, 1):
        now += seconds
        result = StepResult(loss=loss or 1e9, grad_norm=float(number), loss_scale=2.0**number, skipped=loss is None)
        log.add(number, result, Progress(40 + 8 * number, 8, 1e-3), last=number == 7)
    keys = ("iteration", "consumed_samples", "elapsed_ms", "loss", "skipped", "grad_norm", "loss_scale")
    expected = [
        (3, 64, 7000 / 3, 4.5, 1, 3.0, 8.0),
        (6, 88, 8000.0, 2.0, 0, 6.0, 64.0),
        (7, 96, 3000.0, 0.5, 0, 7.0, 128.0),  # the last one, although the interval is not over
    ]
    for line, values in zip(run.metrics(), expected, strict=True):
        assert [line[key] for key in keys] == pytest.approx(values)
        assert line["tokens_per_s"] == pytest.approx(8 * run.plan.model.sequence_length / values[2] * 1e3)
    printed = [line for text in capsys.readouterr().out.splitlines() if (line := iteration_line(text)) is not None]
    assert [(line.iteration, line.loss, line.skipped) for line in printed] == [(3, 4.5, 1), (6, 2.0, 0), (7, 0.5, 0)]


def test_memory_for_iterations_without_a_line_keeps_the_newest() -> None:
    unlogged = Unlogged(room=1000)
    for number in range(100):
        unlogged.add(f"line {number:>20}")
    kept = unlogged.lines()
    assert len(kept) >= 15
    assert kept == [f"line {number:>20}" for number in range(100 - len(kept), 100)]
    unlogged.clear()
    assert unlogged.lines() == []


def _not_a_number() -> None:
    raise not_finite(5, "loss", math.nan)


def _own_error() -> None:
    raise ValueError("an error of the model's own")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def breaks(rank: int, how: Callable[[], None]) -> Iterator[None]:
    """One rank fails in iteration 5."""
    step = Engine.step

    def broken(self: Engine, iteration: int, halves: bool = False) -> StepResult:
        if iteration == 5 and self._place.rank == rank:
            how()
        return step(self, iteration, halves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rank", "how"),
    [
        pytest.param("parallel.data=2 parallel.pipeline=2", 2, _not_a_number, id="the other replica"),
        pytest.param("parallel.data=2 parallel.pipeline=2", 3, _killed, id="the rank that logs is killed"),
        pytest.param("parallel.tensor=2 parallel.pipeline=2", 0, _own_error, id="tensor parallel"),
        pytest.param("parallel.data=1 parallel.pipeline=1", 0, _not_a_number, id="one rank"),
    ],
)
def test_losses_of_all_iterations_before_a_failure_are_logged_whatever_the_interval(
    engine_run: Callable[..., EngineRun], layout: str, rank: int, how: Callable[[], None]
) -> None:
    words = (*layout.split(), "train.iterations=6")
    run = engine_run(*words, "train.log_interval=3")
    assert run.go(breaks(rank, how)) == 1
    whole = engine_run(*words, "train.log_interval=1", name="whole")
    assert whole.go() == 0
    assert [line["iteration"] for line in run.metrics()] == [3, 4]
    losses = whole.losses()
    assert run.losses() == pytest.approx([losses[:3].mean(), losses[3]], rel=1e-6)
    printed = [line for text in run.run.node_out("local-0").read_text().splitlines() if (line := iteration_line(text))]
    assert [line.iteration for line in printed] == [3, 4]
    assert {*run.metrics()[1]} == {*run.metrics()[0]}
