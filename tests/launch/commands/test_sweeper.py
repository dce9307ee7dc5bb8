"""A sweep that a sweeper drives, Optuna's: each of its batches is run, and it reads the runs' values."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from conf.run_folder.rundir import RunDir
from launch.commands.launch import main
from launch.errors import LaunchError
from launch.sweep.outcomes import NoValue, in_points
from launch.tracking.series import Point
from tests.support.launch.live import WORKER, no_data_needed

OPTUNA = ("-m", "hydra/sweeper=optuna", "train.log_interval=1")


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Optuna's logger keeps the stderr that it has met first, which pytest closes after a test."""
    import optuna

    optuna.logging.disable_default_handler()


def launch(*words: str) -> int:
    return main([*OPTUNA, *words], preflight=no_data_needed, worker=WORKER)


@pytest.mark.slow
def test_the_sweeper_reads_what_each_run_has_logged_and_goes_on_past_those_that_have_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in's loss falls by 0.01 with each iteration."""
    monkeypatch.chdir(runs.parent)
    how = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.n_trials=4")
    varied = ("train.iterations=choice(6,12)", "parallel.global_batch_size=choice(4,5)")
    assert launch(*how, "hydra.sweeper.max_failure_rate=1", *varied, "sweep_metric=train/loss") == 1
    captured = capsys.readouterr()
    heading, *rows = captured.out.splitlines()
    assert heading.split()[-1] == "train/loss"
    assert {("=12" in row, float(row.split()[-1])) for row in rows} == {(True, 4.88), (False, 4.94)}
    messages = [line for line in captured.err.splitlines() if "parallel.global_batch_size=5 is not divisible" in line]
    shared = [re.search(r"(\d+)(?: of \d+)? combinations, such as ", message) for message in messages]
    refused = sum(1 if found is None else int(found[1]) for found in shared)
    assert refused > 0
    assert refused + len(rows) == 4
    (found,) = (runs / "sweeps").glob("*/optimization_results.yaml")
    best = yaml.safe_load(found.read_text())
    assert best["best_params"] == {"train.iterations": 12, "parallel.global_batch_size": 4}
    assert math.isclose(best["best_value"], 4.88)


@pytest.mark.slow
def test_a_sweep_ends_where_a_run_lacks_the_metric(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    with pytest.raises(NoValue, match=r"no train/accuracy: it logged iteration_ms, samples, tokens, train/loss"):
        launch("train.iterations=choice(6,7)", "hydra.sweeper.n_jobs=1", "sweep_metric=train/accuracy")
    assert len(list(RunDir.all(runs))) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.iterations=choice(6,7)"], r"^hydra/sweeper=optuna: the sweeper ended: .*add sweep_metric=…, such as"),
        (
            ["train.iterations=choice(6,7)", "hydra.sweeper.direction=sideways"],
            r"^hydra/sweeper=optuna: the sweeper ended: .*minimize",
        ),
        (
            ["train.iterations=choice(6,7)", "sweep_metric=iteration_s"],
            "^a combination has no iteration_s, because its run was not started",
        ),
    ],
    ids=["no-metric", "what-the-sweeper-cannot", "a-wrong-name"],
)
def test_nothing_is_started_where_the_sweeper_cannot_go_on(
    words: list[str], told: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    with pytest.raises(LaunchError, match=told):
        launch(*words)
    assert not runs.exists()
    if "sweep_metric=iteration_s" in words:
        assert "sweep_metric=iteration_s: no run logs that; did you mean iteration_ms" in capsys.readouterr().err


def test_speeds_are_medians_and_all_else_is_the_last_value() -> None:
    points = [
        Point(iteration=number, unix=0.0, values={"iteration_ms": ms, "train/loss": loss})
        for number, ms, loss in ((1, 900.0, 5.0), (2, 10.0, 4.0), (3, 12.0, 3.0), (4, 50.0, 3.5))
    ]
    assert in_points(points, "iteration_ms") == 12.0
    assert in_points(points[:1], "iteration_ms") == 900.0
    assert in_points(points, "train/loss") == 3.5
    assert in_points(points, "valid/loss") is None
