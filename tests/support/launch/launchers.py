"""Other processes that launch a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from conf.run_folder.rundir import RunDir
from launch.files.locks import launching
from megatron_ext.contract.worker import die_with_parent
from tests.support.launch.live import wait_for


@contextmanager
def launched_by_another(run: RunDir) -> Iterator[int]:
    """In the block another process launches the run; its id."""
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL)
        try:
            with launching(run):
                signal.pause()
        finally:
            os._exit(1)
    try:
        wait_for(lambda: f'"pid": {pid}' in run.launch_lock.read_text() if run.launch_lock.exists() else False)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
