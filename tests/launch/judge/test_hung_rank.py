"""A rank of a real run stands still: the verdict names it, not those that waited for it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.report import main as report
from launch.control.follow import follow
from launch.control.submit import submit
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from launch.node.worker_command import WORKER as ENGINE
from tests.support.launch.live import TWO_NODES, ranks, token, wait_for
from tests.support.megatron_ext.engine_run import make_corpus

HANGING = "tests.support.launch.hanging_worker"
PIPELINE = ("parallel.data=1", "parallel.pipeline=4", "parallel.partition=1-1-1-1")
TENSOR = ("parallel.tensor=2", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=2-2")
REPLICAS = ("parallel.data=4", "parallel.pipeline=1", "parallel.partition=4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def start(runs: Path, corpus: Path, worker: str, *overrides: str) -> RunDir:
    settings = [f"runs_dir={runs}", f"data.prefix={corpus}", "train.iterations=100000", "train.log_interval=1"]
    settings += ["train.lr_warmup_iterations=0", "parallel.global_batch_size=8", "parallel.micro_batch_size=1"]
    settings += ["model.sequence_length=24", "model.vocab_size=61", "train.comm_timeout_s=3", *overrides]
    return submit(compose(settings), settings, worker)


def assert_blamed(run: RunDir, rank: int, why: str) -> None:
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "rank-stood-still"), verdict
    assert verdict.reason.startswith(f"rank {rank} ("), verdict
    assert why in verdict.reason
    page = run_page_of(run)
    table = page.split("<h2>Failed ranks</h2>")[1].split("</table>")[0]
    first = re.findall(r"<td[^>]*>(.*?)</td>", table.split("<tr>")[2])
    assert (first[0], first[2]) == (str(rank), "cause")
    assert why in first[-1]
    assert table.count("caused by another") == table.count("<tr>") - 2
    assert f"tdpp launch resume={run.path}" in page.split("<h2>Failed ranks</h2>")[1].split("</section>")[0]
    assert processes.find(token(run)) == set()


def run_page_of(run: RunDir) -> str:
    report([str(run.path), "--runs-dir", str(run.path.parents[1])])
    return (run.path / "report/index.html").read_text()


@pytest.mark.parametrize(
    ("layout", "rank"), [((*PIPELINE, *TWO_NODES), 2), (TENSOR, 1)], ids=["pipeline-over-two-nodes", "tensor"]
)
def test_one_that_was_stopped(runs: Path, corpus: Path, layout: tuple[str, ...], rank: int) -> None:
    run = start(runs, corpus, ENGINE, *layout)
    wait_for(run.metrics.exists, 60)
    os.kill(ranks(run)[rank], signal.SIGSTOP)
    assert_blamed(
        run, rank, f"stood still: its process {ranks(run)[rank]} was stopped by SIGSTOP or Ctrl-Z (iteration "
    )


@pytest.mark.parametrize(
    ("layout", "rank", "at"),
    [(TENSOR, 3, "forward"), (REPLICAS, 0, "optimizer")],
    ids=["in-a-pass", "in-the-optimizer"],
)
def test_one_that_sleeps(runs: Path, corpus: Path, layout: tuple[str, ...], rank: int, at: str) -> None:
    hangs = (f"+cluster.environment.HANG_RANK={rank}", f"+cluster.environment.HANG_AT={at}")
    run = start(runs, corpus, HANGING, *layout, *hangs)
    assert_blamed(run, rank, " (iteration 3, after: ")
    assert " s in hanging_worker.py:" in judge(run).reason
