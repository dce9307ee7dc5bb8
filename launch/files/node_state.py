"""nodes/<node>.json, by which the other nodes, and whoever watches, know how a node is."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from conf.run_folder.rundir import RunDir
from launch.files.attempt import Start

BEAT_S = 2.0
"""Between two signs of life."""


CLOCK_S = 5.0
"""A clock that moved so far against the monotonic one was set, or the machine slept."""
REQUEUED = "requeued"
"""What an agent says of its node: its ranks have saved, and its job is to be started again."""


class NodeState:
    """The file of this process's node, written anew with every change and every sign of life."""

    def __init__(self, run: RunDir, name: str, node_rank: int, start: Start, job: str | None) -> None:
        self._run = run
        self._path = run.node_state(name)
        self.started_unix = time.time()
        self._content: dict[str, Any] = {
            "node": name,
            "node_rank": node_rank,
            "start": str(start),
            "job": job,
            "host": _host(job),
            "pid": os.getpid(),
            "started_unix": self.started_unix,
            "state": "starting",
            "doing": None,
            "image": None,
            "worker_stopped": False,
            "beat_unix": time.time(),
            "ended_unix": None,
            "exit_code": None,
            "stopped": None,
            "stopped_unix": None,
            "reason": None,
            "withdrew": [],
            "clock_set_unix": None,
            "clock_set_by_s": 0.0,
            "out_begin": _size(run.node_out(name)),
            "err_begin": _size(run.node_err(name)),
        }
        self._next_beat = 0.0
        self._clock_s = time.time() - time.monotonic()
        self.publish()

    def publish(self, **changes: Any) -> None:
        unix = time.time()
        clock_s = unix - time.monotonic()
        if abs(clock_s - self._clock_s) > CLOCK_S:  # ages of what was written before are to be right afterwards
            self._content |= {"clock_set_unix": unix, "clock_set_by_s": clock_s - self._clock_s}
        self._clock_s = clock_s
        self._content |= {"beat_unix": unix, **changes}
        self._run.write_json(self._path, self._content)
        self._next_beat = time.monotonic() + BEAT_S

    def prepares(self, doing: str | None) -> None:
        """What the node's container waits for, if that is news."""
        if doing != self._content["doing"]:
            self.publish(state="preparing", doing=doing)

    def beat(self, worker_stopped: bool = False) -> None:
        """To be called often."""
        if worker_stopped != self._content["worker_stopped"]:
            self.publish(worker_stopped=worker_stopped)
        if time.monotonic() >= self._next_beat:
            self.publish()


def _host(job: str | None) -> str:
    """As Slurm calls this machine in a job of its, or else as that calls itself."""
    given = os.environ.get("SLURMD_NODENAME") if job is not None else None
    return given or socket.gethostname()


def _size(path: Path) -> int:
    """Of a file that an earlier start may have left, in bytes."""
    return path.stat().st_size if path.exists() else 0
