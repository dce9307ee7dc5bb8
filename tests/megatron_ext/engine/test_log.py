"""A log line is of all iterations since the one before, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conf.run_folder.log_lines import iteration_line
from megatron_ext.engine.log import TrainingLog
from megatron_ext.engine.results import Progress, StepResult
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
