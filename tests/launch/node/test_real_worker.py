"""The engine's own worker under a node agent: what the stand-in stands for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.follow import follow
from launch.control.submit import submit
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.node.worker_command import WORKER as ENGINE
from megatron_ext.contract.worker import SAVED
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support.launch.live import ranks, token, wait_for, workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    random = np.random.default_rng(0)
    write_indexed(prefix, (random.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
    return prefix


def start(runs: Path, corpus: Path, iterations: int) -> RunDir:
    settings = [f"runs_dir={runs}", f"data.prefix={corpus}", f"train.iterations={iterations}", "train.log_interval=1"]
    settings += ["train.lr_warmup_iterations=0", "parallel.global_batch_size=4", "model.sequence_length=32"]
    return submit(compose(settings), settings)


def test_it_trains_to_the_end(runs: Path, corpus: Path) -> None:
    run = start(runs, corpus, 3)
    follow(run)
    assert judge(run).state == State.succeeded


def test_it_is_asked_to_save_until_it_has_ended(runs: Path, corpus: Path) -> None:
    """Also while its Python ends, when no handler is there any more."""
    run = start(runs, corpus, 100_000)
    wait_for(run.metrics.exists, 30)
    (worker,) = workers(run, ENGINE)
    while worker in processes.find(token(run)):
        processes.send([worker], signal.SIGUSR2)
        time.sleep(0.001)
    follow(run)
    assert run.read_json(run.node_state("local-0"))["exit_code"] == SAVED
    assert (run.checkpoints / "latest").exists()


def test_its_killed_rank_is_named_first(runs: Path, corpus: Path) -> None:
    run = start(runs, corpus, 100_000)
    wait_for(run.metrics.exists, 30)
    os.kill(ranks(run)[2], signal.SIGKILL)
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "rank-failed")
    assert verdict.reason.startswith("rank 2 (stage 1, dp 0, tp 0, node local-0) was killed by SIGKILL")
    assert processes.find(token(run)) == set()
