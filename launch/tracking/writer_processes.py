"""The writers of a run's trackers, as the node agent of its last rank keeps them: they end with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from conf.run_folder.run_files import appended
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from launch.machine import processes
from megatron_ext.contract.worker import NODE_RANK, START

_OWN = ("PYTHONPATH", NODE_RANK, START)
"""What writers are not given of the ranks' environment, so that ending a node's worker by it ends no writer."""
_SAID = (0, 1)
"""Exit codes of a writer that ended by itself, and said why if anything was wrong."""


class Writers:
    """One process for each tracker."""

    def __init__(self, run: RunDir, node: str, kinds: Sequence[Tracker], given: Mapping[str, str]) -> None:
        self._run, self._node = run, node
        if not kinds:
            self._processes: dict[Tracker, subprocess.Popen[bytes]] = {}
            return
        environment = {name: value for name, value in os.environ.items() if name not in _OWN}
        environment |= {name: value for name, value in given.items() if name not in _OWN}
        self._processes = {
            kind: processes.helper(
                run, node, ["launch.tracking.writer", str(run.path), str(kind)], environment, piped=True
            )
            for kind in dict.fromkeys(kinds)
        }

    def finish(self) -> None:
        """Nothing more will be logged: they write what is there, and end."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()

    @property
    def busy(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def kill(self) -> None:
        """Ends those that are left, and says on the node's stderr what did not end by itself."""
        for kind, process in self._processes.items():
            late = process.poll() is None
            if late:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if late or process.returncode not in _SAID:
                why = "did not finish writing in time" if late else f"its writer exited with {process.returncode}"
                with appended(self._run.node_err(self._node)) as err:
                    err.write(f"log={kind}: {why}; 'tdpp report RUN --{kind}' writes what is missing\n".encode())


@contextmanager
def written(run: RunDir, node: str, kinds: Sequence[Tracker], given: Mapping[str, str]) -> Iterator[Writers]:
    """Has the trackers written meanwhile. `given` is the environment of the node's ranks, with the run's token."""
    writers = Writers(run, node, kinds, given)
    try:
        yield writers
    finally:
        writers.kill()
