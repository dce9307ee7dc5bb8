"""The seed's layout on the test cluster: one A100 node and seven A10 nodes, a rank on each, on the CPU."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands.launch import main
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge
from launch.machine.slurm_commands import comment_of
from launch.machine.slurm_commands import submitted as submitted_jobs
from tests.support import PATIENCE_S
from tests.support.launch.live import FOREVER, WORKER, no_data_needed
from tests.support.slurm.cluster import Cluster

NODES = [
    "cluster=a100x1_a10x7",
    "+gpu@cluster.gpus.cpu=cpu",
    *(f"cluster.groups.{group}.{key}" for group in ("hgx", "gpu2") for key in ("gpu=cpu", "gpus_per_node=1")),
    "executor=slurm",
    "train.lr_warmup_iterations=0",
]
SEED = [
    "model=tiny",
    "model.layers=12",
    "parallel.data=1",
    "parallel.node_order=null",
    "parallel.pipeline=8",
    "parallel.partition=0-3-2-2-2-2-1-0",
    "parallel.global_batch_size=16",
    "parallel.micro_batch_size=1",
]
"""The partition 0-11-8-8-8-8-5-0 scaled to twelve layers."""
SMALL = [
    "parallel.node_order=hgx+gpu2*2",
    "parallel.data=1",
    "parallel.pipeline=3",
    "parallel.partition=1-2-1",
    "parallel.global_batch_size=4",
    "parallel.micro_batch_size=1",
]
"""A master job of one node, a slave job of two."""
TRAINED = [
    "train.log_interval=1",
    "train.lr_warmup_iterations=0",
    "model.hidden=32",
    "model.heads=2",
    "model.sequence_length=16",
    "model.vocab_size=101",
]
"""A model that real ranks train in milliseconds."""
MASTER, SLAVE = 0, -1
"""Of the jobs of such a run, with het=jobs."""
BOTH_WAYS = ("jobs", "hetjob")
"""Of a run on nodes of two groups: `executor.het`."""


@dataclass(frozen=True)
class Trainer:
    """The worker of a run, and the overrides that it needs: the stand-in is about as slow as real ranks."""

    worker: str = WORKER
    words: Sequence[str] = ("+cluster.environment.ITERATION_S='0.1'",)


def submitted(runs: Path, *overrides: str, worker: str = WORKER) -> RunDir:
    """A run of the layout `SMALL` with the stand-in worker, or of what else is given, as `tdpp launch` submits it."""
    main([f"runs_dir={runs}", *NODES, *SMALL, *overrides], preflight=no_data_needed, worker=worker)
    return RunDir.find(runs, None)


def wait_for(condition: Callable[[], object]) -> None:
    """For as long as it may take on a busy machine."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.3)


def verdict_of(run: RunDir) -> Verdict:
    """The verdict on a run once it is over, and its jobs have left the queue."""
    wait_for(lambda: judge(run).state not in (State.starting, State.running, State.failing))
    wait_for(lambda: not submitted_jobs(comment_of(run.read_json(run.jobs)["token"]), os.getuid()))
    return judge(run)


def at_work(run: RunDir, iterations: int = 2) -> bool:
    """Whether the run has logged some iterations."""
    return run.metrics.exists() and run.metrics.read_text().count("\n") >= iterations


def ids(run: RunDir) -> list[str]:
    """Slurm's, of the run's jobs."""
    return [job["id"] for job in run.read_json(run.jobs)["jobs"]]


def endless(tmp_path: Path, *overrides: str, worker: str = WORKER) -> RunDir:
    """A run at work."""
    run = submitted(tmp_path / "runs", *FOREVER, "train.log_interval=1", *overrides, worker=worker)
    try:
        wait_for(lambda: at_work(run))
    except AssertionError:
        pytest.fail(f"the run does not train: {judge(run)}")
    return run


@contextmanager
def occupied(slurm: Cluster, *options: str) -> Iterator[str]:
    """A job of somebody else is at work, so that some nodes are not free for as long as the block takes; its id."""
    alone = ("--parsable", "--exclusive", "--time=60", "-o", "/dev/null")
    job = slurm.run("sbatch", *alone, *options, "--wrap", "sleep infinity")
    assert job.returncode == 0, job.stderr
    number = job.stdout.strip()
    wait_for(lambda: "RUNNING" in [other.state for other in slurm.jobs() if other.id == number])
    yield number
    slurm.run("scancel", number)
    wait_for(lambda: number not in [other.id for other in slurm.jobs()])


def iterations(run: RunDir) -> list[int]:
    """Those that were logged."""
    return [json.loads(line)["iteration"] for line in run.metrics.read_text().splitlines()]


def without_hosts(text: str) -> str:
    """What is said of nodes, without the hosts that Slurm chose for them."""
    return re.sub(r"(node [\w-]+) on [\w-]+", r"\1", text)


def assert_failed(verdict: Verdict, rule: str, reason: str) -> None:
    told = "\n".join([verdict.reason, *verdict.evidence])
    assert (verdict.state, verdict.rule) == (State.failed, rule), told
    assert reason in without_hosts(verdict.reason), told
    assert verdict.exit_code == 1
