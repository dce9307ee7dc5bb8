"""Which agent runs a node of an elastic run, where two might: one that stalled is back while another has come for it.

Agents claim their node one after another, each by a file with the next number, which only one process can create. The
last claim counts. An agent looks for a later one before it starts ranks and as long as they run.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from itertools import count
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.files.records import BEAT_S, REQUEUED, ClaimRecord, NodeRecord
from megatron_ext.contract.files import write_atomic

QUIET_S = 3 * BEAT_S
"""A node that gives no sign of life for so long may be claimed by another agent."""
_POLL_S = 0.2


class Replaced(TdppError):
    """Another agent runs this node; this one has to end, and must not write anything into the node's files."""


class Claim:
    """The right of this process to run a node."""

    def __init__(self, run: RunDir, name: str, submission: int, job: str | None) -> None:
        self._run = run
        self._name = name
        self._submission = submission
        self._job = job
        self._number = 0

    def take(self, *, at_once: bool) -> None:
        """Claims the node, once the agent that had it before is known to be silent.

        Args:
            at_once: does not wait for that: Slurm has started the node's own job again.

        Raises:
            Replaced: that agent gives signs of life, or yet another one was faster.
        """
        last = next(number for number in count() if not self._path(number + 1).exists())
        if last and not at_once:
            self._await_silence(last)
        self._number = last + 1
        record = {"host": socket.gethostname(), "pid": os.getpid(), "job": self._job, "unix": time.time()}
        if not created(self._path(self._number), json.dumps(record, indent=1) + "\n"):
            raise self._replaced(self._number)

    def check(self) -> None:
        """Raises Replaced if another agent has claimed the node since."""
        if not self.holds:
            raise self._replaced(self._number + 1)

    @property
    def holds(self) -> bool:
        return not self._path(self._number + 1).exists()

    def _path(self, number: int) -> Path:
        return self._run.claim(self._submission, self._name, number)

    def _await_silence(self, last: int) -> None:
        beat = self._beat()
        until = time.monotonic() + QUIET_S
        while beat is not None and time.monotonic() < until:
            time.sleep(_POLL_S)
            if self._beat() not in (beat, None):
                raise self._replaced(last)

    def _beat(self) -> float | None:
        """The last sign of life of the agent that has the node; None if it has ended."""
        record = self._run.read(self._run.node_state(self._name), NodeRecord)
        over = record is None or record.of.submission != self._submission or record.state in ("ended", REQUEUED)
        return None if over or record is None else record.beat_unix

    def _replaced(self, number: int) -> Replaced:
        holder = self._run.read(self._run.claim(self._submission, self._name, number), ClaimRecord)
        who = "another agent"
        if holder is not None:
            of_job = f" of job {holder.job}" if holder.job is not None else ""
            who = f"process {holder.pid} on {holder.host}{of_job}"
        return Replaced(f"node {self._name} is run by {who}: this agent ends")


def created(path: Path, text: str) -> bool:
    """Writes a file with its whole content at once; False if there is one already."""
    path.parent.mkdir(exist_ok=True)
    own = path.with_name(f".{path.stem}.{secrets.token_hex(8)}")
    write_atomic(own, text)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True
