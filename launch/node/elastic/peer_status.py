"""The other nodes of an elastic run, as a node agent sees them in the files that their agents keep; and which agent
runs a node where two might: one that stalled is back while another has come for it.

Agents claim their node one after another, each by a file with the next number, which only one process can create. The
last claim counts. An agent looks for a later one before it starts ranks and as long as they run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import time
from enum import StrEnum
from itertools import count
from pathlib import Path

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.files.records import BEAT_S, REQUEUED, ClaimRecord, NodeRecord, Start
from launch.node.peers import LATE_S, LOOK_S
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.worker import SAVED

SILENCE_S = 15.0
"""A node that gives no sign of life for this long is gone on without. That is sooner than in other runs, for an error
costs no more than a start."""
DOUBTED_S = 8.0
"""The same once ranks have been lost: something is wrong with a node then."""
REGROUPS, PARKED = "regroups", "parked"
"""What an agent says of its node: its ranks are gone and it waits for a new plan, or it takes no part in this one."""


class Standing(StrEnum):
    """Where another node stands, for a node of a certain start."""

    coming = "coming"
    """Has not begun this start yet."""
    working = "working"
    parked = "parked"
    waits = "waits"
    """For the next plan, having lost something."""
    ready = "ready"
    """For the next plan, having saved because other nodes were chosen."""
    done = "done"
    """Its ranks have ended well."""
    saved = "saved"
    """It ended because time runs out, and goes on from a checkpoint when Slurm starts its job again, or the run is
    resumed."""
    failed = "failed"
    """It ended by an error of its own ranks, which would come again."""
    gone = "gone"


_ENDED_WELL = {0: Standing.done, SAVED: Standing.saved}


def standing(record: NodeRecord | None, start: Start) -> Standing:
    """Returns the standing of a node that gives signs of life, or has said that it ended."""
    if record is None:
        return Standing.coming
    if record.state == "ended":
        if record.exit_code in _ENDED_WELL:
            return _ENDED_WELL[record.exit_code]
        by_itself = record.stopped is None and record.reason is None and (record.exit_code or 0) > 0
        return Standing.failed if by_itself else Standing.gone
    if record.of < start:
        return Standing.coming
    if record.state == REQUEUED:
        return Standing.saved
    if record.state == REGROUPS and record.exit_code == SAVED:
        return Standing.ready
    return {REGROUPS: Standing.waits, PARKED: Standing.parked}.get(record.state, Standing.working)


def comes_back(record: NodeRecord, start: Start) -> bool:
    """Whether Slurm was to start the node's job again, or ended it to do so, in this start."""
    return record.of == start and (record.state == REQUEUED or record.stopped == signal.SIGTERM.name)


_FINAL = (Standing.done, Standing.saved, Standing.failed)


class Fellow:
    """One other node. Its beats are timed by this node's clock, while this node can look: see `peers.Peer`."""

    def __init__(self, run: RunDir, name: str, submission: int, meet_s: float) -> None:
        self.name = name
        self._run = run
        self._submission = submission
        self._meet_s = meet_s
        self._began = time.monotonic()
        self._record: NodeRecord | None = None
        self._silent_s = 0.0
        self._looked = -math.inf

    def look(self, start: Start, *, doubted: bool = False, restarted: bool = False) -> Standing:
        """`doubted`: ranks have been lost. `restarted`: Slurm has started this node's job again in this start."""
        since = time.monotonic() - self._looked
        if since >= LOOK_S:
            self._read(since)
            self._looked = time.monotonic()
        record = self._record
        if restarted and record is not None and comes_back(record, start):
            record = None
        found = standing(record, start)
        most = DOUBTED_S if doubted else SILENCE_S
        late = time.monotonic() - self._began > self._meet_s if record is None else self._silent_s > most
        return Standing.gone if late and found not in _FINAL else found

    def _read(self, since: float) -> None:
        record = self._run.read(self._run.node_state(self.name), NodeRecord)
        if record is not None and record.of.submission < self._submission:
            record = None
        if record is None or self._record is None or record.beat_unix != self._record.beat_unix:
            self._silent_s = 0.0
        else:
            self._silent_s += min(since, LATE_S)
        self._record = record


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
        """Claims the node, once the agent that had it before is known to be silent; `at_once` where Slurm has started
        the node's own job again. Raises Replaced: that agent gives signs of life, or yet another one was faster."""
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
