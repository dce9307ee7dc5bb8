"""What can be seen of a run at one moment; judged in `launch.judge.verdict`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conf.run_folder.gpu_lines import GpuEntry, GpuReading, GpuTrouble
from conf.run_folder.iteration_time import LineTime
from launch.files.records import Goal, RestartRecord, Start
from launch.files.run_files import Fault
from launch.machine.job_states import JobState
from launch.node.missing_run_dir import Unseen
from launch.node.rank_failures import Doing
from launch.observe.iterations import Iteration
from megatron_ext.contract.errors import RankFailure
from megatron_ext.contract.goal import MAX_COST, SAMPLES, UNTIL
from megatron_ext.contract.plan import Plan

READINGS = 3
"""So many in a row must agree."""
SILENT_S = 60
"""A reading is old after this time, and three intervals: the driver does not answer."""


@dataclass(frozen=True, kw_only=True)
class SeenNode:
    """A node as its agent last described it. `state` is `absent` before it has written anything."""

    name: str
    host: str | None = None
    """The machine that it is, as Slurm or the machine itself calls it; None as long as that is not known."""
    state: str = "absent"
    alive: bool
    """Whether its agent lives, or, while absent, may still come."""
    pid: int | None = None
    exit_code: int | None = None
    """The worker's exit code; negative for a signal."""
    stopped: str | None = None
    """Name of the signal by which it was asked to end."""
    stopped_unix: float | None = None
    """When it was."""
    doing: str | None = None
    """What its container waits for, while its agent makes that ready."""
    image: str | None = None
    """The ID of docker's image that its worker runs in."""
    halted: str | None = None
    """Which of its processes somebody has stopped, so that nothing watches its ranks any more."""
    reason: str | None = None
    """Why it ended, in its agent's words, where its exit code does not say it."""
    withdrew: tuple[str, ...] = ()
    """Ids of the run's other jobs that its agent took out of the queue at its end."""
    job: str | None = None
    """The id of its Slurm job."""
    unseen: Unseen | None = None
    """That it does not see the run's folder."""
    started_unix: float | None = None
    """When its agent began."""
    seen_unix: float = 0.0
    """Its end, or its last sign of life."""
    out_begin: int = 0
    err_begin: int = 0
    """Where in nodes/<node>.out and .err this start begins, in bytes."""
    error: str | None = None
    """Where its worker ended with an error: what it said of that, with the remedy."""
    no_memory: str | None = None
    """Where a process of it died: the line on its stderr that says that no memory was left."""

    @property
    def ended(self) -> bool:
        return self.state == "ended"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A Slurm job of the run."""

    id: str
    nodes: tuple[str, ...]
    state: JobState | None
    """None if Slurm has forgotten it, or does not show it to this user; of a Slurm that does not answer a state that
    neither waits nor is over."""
    withdrawn: bool = False
    """Whether one of the run's own nodes took it out of the queue."""

    @property
    def over(self) -> bool:
        return self.state is None or self.state.over

    def __str__(self) -> str:
        return f"job {self.id} is unknown to Slurm" if self.state is None else str(self.state)


@dataclass(frozen=True, kw_only=True)
class NodeGpus:
    """What nodes/<node>.gpu holds last."""

    node: str
    ranks: int
    """So many of the GPUs does the plan use: the first ones."""
    entries: tuple[GpuEntry, ...]

    @property
    def readings(self) -> tuple[GpuReading, ...]:
        """The newest, last, and those before it, up to a trouble or an earlier start of the run."""
        found: list[GpuReading] = []
        for entry in reversed(self.entries):
            if isinstance(entry, GpuTrouble) or (found and entry.number >= found[-1].number):
                break
            found.append(entry)
        return tuple(reversed(found))

    def age_s(self, now: float) -> float | None:
        """Returns the age of the newest reading, if that is too old to speak for now."""
        last = self.readings[-1]
        age = now - last.unix
        return age if age > SILENT_S + 3 * last.interval_s else None


class RunKind(StrEnum):
    """What a run is: training, here, on a cluster or on hosts that ssh reaches, or no more than the times that it
    would take."""

    local = "local"
    slurm = "slurm"
    hosts = "hosts"
    rehearsal = "rehearsal"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A run at one moment."""

    kind: RunKind
    launched_unix: float
    """For the first time."""
    plan: Plan
    runs_dir: str
    now_unix: float
    stop_unix: float | None
    """When it was asked to stop."""
    free_bytes: int
    """On the disk of the run folder, for this user."""
    read_only: bool = False
    """Whether a node is lost, and nothing can be written into the run folder from here."""
    clocks: tuple[str, ...] = ()
    """Clocks of nodes that were set or differ, as ages are counted without it: a sentence each."""
    jobs: tuple[Job, ...]
    """Slurm's, where it was asked."""
    job_ids: tuple[str, ...] = ()
    """Slurm's, of all its jobs, also where it was not asked."""
    after: str | None = None
    """The run that must succeed before its jobs start."""
    silence: str | None
    """Why Slurm, which was asked, gave no answer."""
    cut_off: bool
    """Whether its launch ended before all of it was submitted."""
    start: Start
    """The newest one, or the one that is waited for."""
    restarted: RestartRecord | None = None
    """Why Slurm started it again for the newest start, as far as that is known."""
    saved: int | None
    """Iteration of the newest checkpoint on disk."""
    kept: int | None = None
    """While nodes make a new plan, that of the newest one in their memory."""
    spent: float | None = None
    """Dollars, of a run that counts them (train.max_cost)."""
    nodes: tuple[SeenNode, ...]
    errors: tuple[RankFailure, ...]
    """The errors of its ranks, by time."""
    goal: Goal | None = None
    """Where it ended before its last iteration on its own, why."""
    log: tuple[Iteration, ...]
    """The last logged iterations."""
    times: tuple[LineTime, ...]
    """The times of all logged iterations."""
    doings: tuple[Doing, ...]
    """Where ranks lost others, or have logged nothing for a while: what they were doing, of those that stood still and
    of those that waited for them."""
    gpus: tuple[NodeGpus, ...]
    """The GPUs of the nodes at work; none in a run on CPUs."""
    faults: tuple[Fault, ...]
    """What of the run's files cannot be read."""

    def job_of(self, node: SeenNode) -> Job | None:
        own = [job for job in self.jobs if node.name in job.nodes]
        return next((job for job in own if job.id == node.job), own[0] if own else None)

    @property
    def over(self) -> bool:
        """Whether nothing more will come: every node has ended or is lost.

        What was ended from outside may be started again by Slurm; that is not known before its job has ended.
        """
        undecided = any(
            node.stopped and not node.reason and (job := self.job_of(node)) is not None and not job.over
            for node in self.nodes
        )
        return all(node.ended or not node.alive for node in self.nodes) and not undecided

    @property
    def took_s(self) -> float | None:
        """The seconds from the begin of its newest start to its end, or until now; None before that."""
        began = [node for node in self.nodes if node.started_unix is not None]
        if not began:
            return None
        end = max(node.seen_unix for node in began) if self.over else self.now_unix
        return max(0.0, end - min(node.started_unix or 0.0 for node in began))

    @property
    def iterations(self) -> int:
        """Up to its goal, where it has reached one before the last that it may take."""
        if self.goal is not None and self.goal.ended_by in (UNTIL, SAMPLES):
            return self.goal.iteration
        return self.plan.train.iterations

    @property
    def adapts(self) -> bool:
        """Whether its batch does, so that its samples say how far it is, and not its iterations."""
        adapt = self.plan.adapt
        return adapt is not None and adapt.measures and self.plan.train.samples is not None

    @property
    def of_iterations(self) -> str:
        """`iterations` for people: where the batch adapts they are a bound while the run goes on."""
        open_ended = self.adapts and (self.goal is None or self.goal.ended_by == MAX_COST)
        return f"{'at most ' * open_ended}{self.iterations}"
