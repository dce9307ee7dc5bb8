"""The process that keeps checkpoints in the memory of a node of an elastic run (`train.save_memory`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conf.run_folder.rundir import RunDir
from launch.machine import processes
from launch.machine.provenance import path_of_agents
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import NODE_RANK, START

_OWN = (NODE_RANK, START)
"""What it is not given of the ranks' environment, so that ending a node's worker by it does not end the keeper."""
_LOOK_S = 0.5
AGAIN_S = 5.0
"""What was killed because memory ran out is not started again at once."""


@contextmanager
def keeping(run: RunDir, plan: Plan, node: str, submission: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Has such a process run meanwhile, where the plan wants one; it dies with this one.

    One that was killed, as where memory runs out, is started again with nothing in it; one that ends by itself has said
    why it cannot run.

    Args:
        environment: of the ranks, which may say by which interface nodes reach each other.
    """
    if plan.train.save_memory is None:
        yield
        return
    given = {name: value for name, value in (os.environ | dict(environment)).items() if name not in _OWN}
    command = [sys.executable, "-P", "-m", "megatron_ext.checkpoints.keeper", str(run.path), node, str(submission)]

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env={**given, "PYTHONPATH": path_of_agents()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.begin_helper,
        )

    over = threading.Event()

    def keep() -> None:
        """In a thread that lives as long as its processes may: the kernel ends these with the thread."""
        process = started()
        while not over.wait(_LOOK_S):
            if (process.poll() or 0) < 0 and not over.wait(AGAIN_S):
                name = signal.Signals(-process.returncode).name
                print(f"checkpoints in this node's memory are lost, by {name}; new ones are kept", flush=True)
                process = started()
        process.kill()
        process.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
