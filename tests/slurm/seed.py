"""The seed's layout on the test cluster: one A100 node and seven A10 nodes, a rank on each, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from conf.rundir import RunDir
from launch.app import main
from launch.slurm_commands import comment_of
from launch.slurm_commands import submitted as submitted_jobs
from launch.verdict import State, Verdict, judge
from tests.launch.live import WORKER, no_data_needed

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


def submitted(runs: Path, *overrides: str, worker: str = WORKER) -> RunDir:
    """A run of the layout `SMALL` with the stand-in worker, or of what else is given, as `tdpp launch` submits it."""
    main([f"runs_dir={runs}", *NODES, *SMALL, *overrides], preflight=no_data_needed, worker=worker)
    return RunDir.find(runs, None)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.2)


def verdict_of(run: RunDir, seconds: float = 90) -> Verdict:
    """The verdict on a run once it is over, and its jobs have left the queue."""
    wait_for(lambda: judge(run).state not in (State.starting, State.running), seconds)
    wait_for(lambda: not submitted_jobs(comment_of(run.read_json(run.jobs)["token"])))
    return judge(run)


def at_work(run: RunDir, iterations: int = 2) -> bool:
    """Whether the run has logged some iterations."""
    return run.metrics.exists() and run.metrics.read_text().count("\n") >= iterations
