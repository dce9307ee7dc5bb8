"""What is read of the files that a run's agents, workers and launcher write (docs/formats.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from conf.run_folder.json_values import Count, Rule, Unix
from launch.files.attempt import Start

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
    """As the machine calls itself."""
    boot: str | None = None
    """Of a host that ssh reaches: which of its starts it was (random/boot_id). Machines may share a name."""
    ssh: str | None = None
    """The name by which ssh reaches it."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """jobs.json."""

    token: str
    executor: Annotated[str, Rule("local, slurm or hosts", lambda value: value in ("local", "slurm", "hosts"))]
    submission: Count
    jobs: tuple[JobRecord, ...]
    container: str = "none"
    """The kind that the workers are in."""

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
class RestartRecord:
    """restart-<start>.json: why Slurm started the run again."""

    unix: Unix
    reason: str


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
