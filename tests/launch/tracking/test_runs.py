"""Trackers of whole runs: beside the agent, after a resume, when they fail, and afterwards by `tdpp report`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from launch.commands import report
from launch.control.follow import follow
from launch.control.stop import stop
from launch.control.submit import resume, submit
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support.launch.live import FOREVER, TWO_NODES, ranks, start, wait_for
from tests.support.launch.trackers import found, in_tensorboard


def losses(run: RunDir) -> list[tuple[int, float]]:
    lines = map(json.loads, run.metrics.read_text().splitlines())
    return [(line["iteration"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]


def test_the_node_that_logs_has_its_log_written(runs: Path) -> None:
    run = start(runs, "log=tensorboard", *TWO_NODES)
    follow(run)
    assert judge(run).state == State.succeeded
    assert [step for step, _ in in_tensorboard(run)["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert in_tensorboard(run)["train/loss"] == losses(run)
    assert run.node_err("local-1").read_text() == ""


def test_a_tracker_that_fails_harms_no_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "no/project")
    run = start(runs, "log=wandb", "+cluster.environment.ITERATION_S=1")
    follow(run)
    assert judge(run).state == State.succeeded
    (said,) = [line for line in run.node_err("local-0").read_text().splitlines() if line.startswith("log=")]
    assert said.startswith("log=wandb ended: ")


def test_a_run_that_is_stopped_leaves_no_writer(runs: Path) -> None:
    run = start(runs, "log=tensorboard", *FOREVER)
    wait_for(lambda: (run.path / "tensorboard").is_dir() and in_tensorboard(run))
    stop(run)
    follow(run)


def test_a_run_is_carried_over_afterwards(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs)
    follow(run)
    assert not (run.path / "tensorboard").exists()
    assert report.main([str(run.path), "--tensorboard"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run.path / "tensorboard")
    assert in_tensorboard(run)["train/loss"] == losses(run)


def test_a_log_of_megatron_lm_is_no_run(tmp_path: Path) -> None:
    log = tmp_path / "n067.out"
    line = " iteration       10/      50 | consumed samples:          640 | elapsed time per iteration (ms): 4541.6 |"
    log.write_text(f"{line} learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 |\n")
    with pytest.raises(LaunchError, match=r"--tensorboard takes runs of tdpp, but .* is a log of Megatron-LM"):
        report.main([str(log), "--tensorboard"])


def test_a_killed_run_that_is_resumed_has_one_curve(runs: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "text_document"
    random = np.random.default_rng(0)
    write_indexed(prefix, (random.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
    words = [f"runs_dir={runs}", f"data.prefix={prefix}", "train.iterations=60", "train.log_interval=1"]
    words += ["train.save_interval=20", "parallel.global_batch_size=4", "model.sequence_length=32", "log=tensorboard"]
    # The rank that is to be killed waits for it, or all 60 may be over by the time that the tracker's file is read.
    waits = [f"+cluster.environment.HANG_{key}" for key in ("RANK=2", "AT=forward", "FROM=25")]
    run = submit(compose([*words, *waits]), [*words, *waits], "tests.support.launch.hanging_worker")
    wait_for(lambda: len(in_tensorboard(run).get("train/loss", [])) > 22)
    os.kill(ranks(run)[2], signal.SIGKILL)
    follow(run)
    assert judge(run).state == State.failed
    resume(run)
    follow(run)
    assert judge(run).state == State.succeeded
    assert in_tensorboard(run)["train/loss"] == losses(run)
    assert [step for step, _ in losses(run)] == list(range(1, 61))
    assert set(found(Tracker.tensorboard, run)) >= {"lr", "samples", "tokens", "throughput/tokens_per_s"}


@pytest.mark.parametrize("word", ["log=tensorboard,wandb", "log=[tensorboard,wandb]", "log=tensorboard, wandb"])
def test_trackers_are_listed_as_people_write_them(word: str) -> None:
    assert compose([word]).log == [Tracker.tensorboard, Tracker.wandb]


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensorboard, wandb, mlflow"):
        compose(["log=tensorbord"])
