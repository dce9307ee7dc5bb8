"""The process that keeps checkpoints in the memory of a node of an elastic run (`train.save_memory`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conf.run_folder.rundir import RunDir
from launch.machine import processes
from launch.machine.provenance import path_of_agents
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK, START

_OWN = (NODE_RANK, START)
"""What it is not given of the ranks' environment, so that ending a node's worker by it does not end the keeper."""


@contextmanager
def keeping(run: RunDir, plan: Plan, node: str, submission: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Has such a process run meanwhile, where the plan wants one; it dies with this one.

    Args:
        environment: of the ranks, which may say by which interface nodes reach each other.
    """
    if plan.train.save_memory is None:
        yield
        return
    given = {name: value for name, value in (os.environ | dict(environment)).items() if name not in _OWN}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron_ext.checkpoints.keeper", str(run.path), node, str(submission)],
        env={**given, "PYTHONPATH": path_of_agents()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=processes.begin_helper,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
