"""The other nodes of an elastic run, as a node agent sees them in the files that their agents keep."""

from __future__ import annotations

import math
import signal
import time
from enum import StrEnum

from conf.run_folder.rundir import RunDir
from launch.files.records import REQUEUED, NodeRecord, Start
from launch.node.peers import LATE_S, LOOK_S
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
