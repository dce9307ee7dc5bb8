"""What a node agent sees of the run's other nodes, in the files that their agents keep.

Node 0 watches all others, and they watch node 0 and the first node of their own job: what befalls one reaches all,
and a shared file system bears it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from conf.run_folder.rundir import RunDir
from conf.visible import span
from launch.files.records import REQUEUED, NodeRecord, Start
from megatron_ext.contract.worker import SAVED

LOOK_S = 1.0
"""Between two looks at a node's file."""
LATE_S = 5.0
"""A look at a node's file counts at most this much silence: what is more, this node itself was held up."""
SILENCE_S = 30.0
"""A node that gives no sign of life for this long counts as lost."""
DECISION_S = 330.0
"""Slurm has decided by then what becomes of a job that lost a node: its SlurmdTimeout is 300 s unless set."""


class Sign(StrEnum):
    """What a node's file says of it, to a node of a certain start."""

    absent = "absent"
    """Has not written anything in this start yet."""
    fine = "fine"
    failed = "failed"
    cut = "cut"
    """Was ended from outside, or gives no sign of life: Slurm may be about to start its job again."""
    ahead = "ahead"
    """Belongs to a later start already."""
    requeued = "requeued"
    """Has saved, and waits to be started again."""


@dataclass(frozen=True)
class Finding:
    """Why this node cannot go on."""

    reason: str
    again: bool
    """Another job of the run is being started again; this one has to be, too."""


class Peer:
    """One other node. Its beats are timed by this node's clock, while this node can look.

    A file system that stands still silences all nodes, and none of them is lost for that.
    """

    def __init__(self, run: RunDir, name: str, start: Start) -> None:
        self.name = name
        self._run = run
        self._start = start
        self._beat: float | None = None
        self._silent_s = 0.0
        self._looked = -math.inf
        self._sign = Sign.absent

    def look(self) -> Sign:
        since = time.monotonic() - self._looked
        if since >= LOOK_S:
            self._sign = self._read(since)
            self._looked = time.monotonic()
        return self._sign

    def _read(self, since: float) -> Sign:
        state = self._run.read(self._run.node_state(self.name), NodeRecord)
        if state is None:
            return Sign.absent
        if state.of != self._start:
            return Sign.ahead if state.of > self._start else Sign.absent
        if state.state == "ended":
            if state.exit_code in (0, SAVED):  # all ranks save together: this node's have, or will in a moment
                return Sign.fine
            return Sign.cut if state.stopped == signal.SIGTERM.name and not state.reason else Sign.failed
        if state.state == REQUEUED:
            return Sign.requeued
        self._silent_s = self._silent_s + min(since, LATE_S) if state.beat_unix == self._beat else 0.0
        self._beat = state.beat_unix
        return Sign.cut if self._silent_s > SILENCE_S else Sign.fine


class JobFate(StrEnum):
    """What Slurm says of another job of the run."""

    lives = "lives"
    """Or is on its way out: not known yet."""
    waits = "waits"
    """In the queue."""
    over = "over"


@dataclass(frozen=True)
class OtherJob:
    """A peer's job as Slurm sees it."""

    text: str
    fate: JobFate


AskSlurm = Callable[[str, float], OtherJob | None]
"""The job of a node, by the node's name, as it was at or after a time (of the monotonic clock).

None where there is none, because the node shares our job or Slurm is not used.
"""


def watched(names: list[str], node_rank: int, job_nodes: Sequence[int]) -> list[str]:
    """Whom a node watches. `names` are by node rank, `job_nodes` the node ranks of its own job by task."""
    if node_rank == 0:
        return names[1:]
    return [names[rank] for rank in dict.fromkeys((0, job_nodes[0])) if rank != node_rank]


class Peers:
    """The nodes that this one watches, for one start of the run."""

    def __init__(self, run: RunDir, watched: Iterable[str], start: Start, meet_s: float, ask: AskSlurm) -> None:
        self._peers = [Peer(run, name, start) for name in watched]
        self._meet_s = meet_s
        self._began = time.monotonic()
        self._ask = ask
        self._cut_since: dict[str, float] = {}

    @property
    def undecided(self) -> bool:
        """Whether a node is lost or left, and what that means for this one will be known in a while."""
        return bool(self._cut_since)

    def look(self) -> Finding | None:
        """Why this node has to end, if it has."""
        for peer in self._peers:
            sign = peer.look()
            finding = None
            if sign not in (Sign.cut, Sign.requeued):  # it is back, or has written more
                self._cut_since.pop(peer.name, None)
            if sign is Sign.ahead:
                finding = Finding(f"node {peer.name} was started again", again=True)
            elif sign is Sign.failed:
                finding = Finding(f"node {peer.name} failed", again=False)
            elif sign is Sign.absent:
                finding = self._missing(peer.name)
            elif sign is Sign.cut:
                finding = self._cut(peer.name)
            elif sign is Sign.requeued:
                finding = self._left_behind(peer.name)
            if finding is not None:
                return finding
        return None

    def _missing(self, name: str) -> Finding | None:
        job = self._ask(name, self._began)
        if job is not None and job.fate is JobFate.over:
            return Finding(f"node {name} will not start: {job.text}", again=False)
        if time.monotonic() - self._began < self._meet_s:
            return None
        why = f": {job.text}" if job is not None else ""
        return Finding(f"node {name} did not start within {span(self._meet_s)} (executor.meet_min){why}", again=False)

    def _left_behind(self, name: str) -> Finding | None:
        """All ranks save together; this node's should end in a moment."""
        since = self._cut_since.setdefault(name, time.monotonic())
        if time.monotonic() - since < SILENCE_S:
            return None
        return Finding(f"node {name} waits to be started again", again=True)

    def _cut(self, name: str) -> Finding | None:
        """A node of another job may be about to come back; until Slurm has decided nothing is known."""
        since = self._cut_since.setdefault(name, time.monotonic())
        job = self._ask(name, since)
        if job is None or job.fate is JobFate.over:
            return Finding(f"node {name} was lost" + (f": {job.text}" if job else ""), again=False)
        if job.fate is JobFate.waits:
            return Finding(f"node {name} was lost, and its job waits to be started again", again=True)
        if time.monotonic() - since < DECISION_S:
            return None
        return Finding(f"node {name} was lost, although its job still runs: {job.text}", again=False)
