"""What a run's agents, workers and launcher write into files (docs/formats.md), typed."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from conf.run_folder.json_values import Count, Rule, Unix
from conf.run_folder.rundir import RunDir


@dataclass(frozen=True, order=True)
class Start:
    """Later ones are greater. As text, in files and in the environment: `<submission>.<restarts>`."""

    submission: int
    """How often the run had been submitted before."""
    restarts: int
    """How often it was started again since: by Slurm, or with a new plan by the nodes of an elastic run."""

    def __str__(self) -> str:
        return f"{self.submission}.{self.restarts}"

    @property
    def next(self) -> Start:
        """The one after it in the same submission."""
        return Start(self.submission, self.restarts + 1)

    @classmethod
    def parse(cls, text: str) -> Start:
        submission, restarts = text.split(".")
        return cls(int(submission), int(restarts))


JobId = Annotated[str, Rule("an id of a job", lambda value: re.fullmatch(r"[0-9]{1,18}", value) is not None)]
StartText = Annotated[str, Rule("<submission>.<restarts>", lambda value: re.fullmatch(r"\d{1,9}\.\d{1,9}", value))]


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job in jobs.json."""

    id: JobId | None
    """None as long as it is being submitted."""
    nodes: tuple[Count, ...]
    """Node ranks, by task."""
    host: str | None = None
    """The machine's own name."""
    boot: str | None = None
    """The start of a host that ssh reaches (random/boot_id): machines may share a name."""
    ssh: str | None = None
    """The name by which ssh reaches it."""
    joins: bool = False
    """Whether it is of joins/: it brings a node back that an elastic run had lost."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """jobs.json."""

    token: str
    executor: Annotated[str, Rule("local, slurm or hosts", lambda value: value in ("local", "slurm", "hosts"))]
    submission: Count
    jobs: tuple[JobRecord, ...]
    container: str = "none"
    """The kind that the workers are in."""
    after: str | None = None
    """The run that must succeed before the jobs start."""
    submitted_unix: Unix | None = None
    expected_unix: Unix | None = None
    """When Slurm, asked before the last submission, expected all of its jobs to start."""

    @property
    def on_slurm(self) -> bool:
        return self.executor == "slurm"

    @property
    def on_hosts(self) -> bool:
        """Whether ssh reaches its nodes."""
        return self.executor == "hosts"

    @property
    def first(self) -> Start:
        """The first start since the last submission."""
        return Start(self.submission, 0)

    @property
    def by_id(self) -> dict[str, JobRecord]:
        """The jobs whose ids are known."""
        return {job.id: job for job in self.jobs if job.id is not None}

    @property
    def launched(self) -> set[int]:
        """Ranks of the nodes whose jobs are known."""
        return {node for job in self.jobs if job.id is not None for node in job.nodes}


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """nodes/<node>.json."""

    start: StartText
    job: str | None
    pid: Count
    started_unix: Unix
    state: str
    beat_unix: Unix
    ended_unix: Unix | None
    exit_code: int | None
    stopped: str | None
    reason: str | None
    out_begin: Count
    err_begin: Count
    stopped_unix: Unix | None = None
    doing: str | None = None
    image: str | None = None
    host: str | None = None
    worker_stopped: bool = False
    withdrew: tuple[str, ...] = ()
    clock_set_unix: Unix | None = None
    """When its host's clock was last set while the agent ran, by the clock as it was set."""
    clock_set_by_s: float = 0.0
    """Seconds forward; negative: back."""

    @property
    def of(self) -> Start:
        return Start.parse(self.start)


@dataclass(frozen=True, kw_only=True)
class DoingRecord:
    """What a rank was doing, in nodes/<node>.ranks.json."""

    does: str
    what: str
    iteration: Count
    since_unix: Unix
    process: str
    at: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """A rank in nodes/<node>.ranks.json."""

    rank: Count
    pid: Count
    doing: DoingRecord | None = None


@dataclass(frozen=True, kw_only=True)
class StopRecord:
    """stop.json."""

    unix: Unix
    saves: bool = False
    """Whether the ranks are to save first."""


@dataclass(frozen=True, kw_only=True)
class SpentRecord:
    """spent.json."""

    dollars: float


@dataclass(frozen=True, kw_only=True)
class ChangeRecord:
    """change-<start>.json."""

    nodes: tuple[Count, ...]
    """Node ranks of those to go on with."""
    reason: str
    unix: Unix


@dataclass(frozen=True, kw_only=True)
class JoinRecord:
    """joins/<start>-<node>.json."""

    id: JobId | None
    """None as long as it is being submitted, and where Slurm refused it."""
    node: Count
    start: StartText
    unix: Unix


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """claims/<submission>-<node>-<number>.json."""

    host: str
    pid: Count
    job: str | None
    unix: Unix


@dataclass(frozen=True, kw_only=True)
class RestartRecord:
    """restart-<start>.json: why Slurm started the run again."""

    unix: Unix
    reason: str
    hosts: tuple[str, ...] = ()
    """Those that failed, where Slurm knows which ones."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """goal.json: why the run ended before its last iteration, having saved."""

    iteration: Count
    """After which it did."""
    ended_by: str
    """The key of `train` that says so: `until`, `max_cost`, or `samples` where the batch adapts."""
    limit: str
    value: float
    """What was reached: of the metric, in dollars, or the samples that were taken."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run was launched, in provenance.json."""

    host: str | None = None
    cwd: str = "."


BEAT_S = 2.0
"""Between two signs of life."""


CLOCK_S = 5.0
"""A clock that moved so far against the monotonic one was set, or the machine slept."""
REQUEUED = "requeued"
"""What an agent says of its node: its ranks have saved, and its job is to be started again."""


class NodeState:
    """The file of this process's node, written anew with every change and every sign of life."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        node_rank: int,
        start: Start,
        job: str | None,
        *,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        """`holds`: whether the node is still this process's; another one's file is left alone."""
        self._run = run
        self._holds = holds
        self._path = run.node_state(name)
        self.started_unix = time.time()
        given = os.environ.get("SLURMD_NODENAME") if job is not None else None
        record = NodeRecord(
            start=str(start),
            job=job,
            host=given or socket.gethostname(),
            pid=os.getpid(),
            started_unix=self.started_unix,
            state="starting",
            beat_unix=self.started_unix,
            ended_unix=None,
            exit_code=None,
            stopped=None,
            reason=None,
            out_begin=_size(run.node_out(name)),
            err_begin=_size(run.node_err(name)),
        )
        self._content: dict[str, Any] = {"node": name, "node_rank": node_rank, **asdict(record)}
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
        if self._holds():
            self._run.write_json(self._path, self._content)
        self._next_beat = time.monotonic() + BEAT_S

    def prepares(self, doing: str | None) -> None:
        """What the node's container waits for, if that is news."""
        if doing != self._content["doing"]:
            self.publish(state="preparing", doing=doing)

    def beat(self, worker_stopped: bool = False) -> None:
        """Writes a sign of life where one is due; it is to be called often."""
        if worker_stopped != self._content["worker_stopped"]:
            self.publish(worker_stopped=worker_stopped)
        if time.monotonic() >= self._next_beat:
            self.publish()


def _size(path: Path) -> int:
    """Returns the bytes of a file that an earlier start may have left."""
    return path.stat().st_size if path.exists() else 0
