"""How the nodes of a run are, as far as its executor shows it: by Slurm's jobs, or by processes of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.files.locks import has_rights_of, owner_of
from launch.files.records import JobRecord, NodeRecord, Origin, Start
from launch.files.run_files import Faults, RunFiles
from launch.machine import processes, slurm_commands
from launch.machine.job_states import JobState
from launch.node.missing_run_dir import Unseen, not_started, unlaunched
from launch.node.peers import SILENCE_S
from launch.observe.observation import Job, SeenNode

SUBMISSION_S = 120.0
"""A launch is cut off if it has not named its jobs after this time, where nothing shows whether it goes on."""
START_S = 5.0
"""A run without a process counts as lost after this time; before, it is still being started."""

Records = Mapping[str, NodeRecord | None]
"""nodes/<node>.json by the node's name; None where there is none."""
Answers = Mapping[str, JobState] | LaunchError
"""The states of jobs by their ids, and of those whose ids nobody wrote down by their comments; or why Slurm does not
say."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How far the launch of a run has come."""

    unix: float
    """When jobs.json was written last."""
    young: bool
    """Whether it is so recent that nodes may still start."""
    launched: frozenset[str]
    """The nodes whose jobs are known."""
    submitting: bool
    """Whether the jobs that are missing may still come."""

    def cut_off(self, nodes: Iterable[SeenNode]) -> bool:
        """Whether it ended before all nodes were submitted."""
        return not self.submitting and any(node.state == "absent" and node.name not in self.launched for node in nodes)


def launch_of(files: RunFiles, executor: Executor, unix: float, now: float, *, stopped: bool) -> Launch:
    """How far a launch has come; `stopped`: whether the run was asked to stop."""
    young = now - unix < executor.patience_s
    names = files.names
    launched = {names[rank] for rank in files.submitted.launched}.union(*(job.nodes for job in executor.jobs))
    goes_on = young and not stopped if files.launching is None else files.launching
    return Launch(
        unix=unix, young=young, launched=frozenset(launched), submitting=goes_on and len(launched) < len(names)
    )


def executor_of(files: RunFiles, answers: Answers) -> Executor:
    """What shows how the run's nodes are; it is looked at here."""
    return SlurmJobs(files, answers) if files.submitted.on_slurm else Processes(files)


class Processes:
    """The agents of a run on this machine, or on hosts that ssh reaches. Where this user does not see their processes,
    their signs of life must do."""

    jobs: tuple[Job, ...] = ()

    def __init__(self, files: RunFiles) -> None:
        self._elastic = files.plan.elastic is not None
        self._here = _names_here(files)
        self._living = processes.find(files.submitted.token) if self._here and not files.done else None
        sees_all = self._living is not None and not files.submitted.on_hosts
        self.patience_s = START_S if sees_all else SILENCE_S

    def nodes(
        self, records: Records, start: Start, launch: Launch, now: float
    ) -> tuple[tuple[SeenNode, ...], tuple[Job, ...]]:
        """The nodes in the newest start, and no jobs."""
        return tuple(self._node(name, record, start, launch, now) for name, record in records.items()), ()

    def _node(self, name: str, record: NodeRecord | None, start: Start, launch: Launch, now: float) -> SeenNode:
        living = self._living if name in self._here else None
        if record is None or record.of != start:
            beats = self._elastic and record is not None and now - record.beat_unix < SILENCE_S
            starting = launch.submitting or bool(living) or beats or (name in launch.launched and launch.young)
            return SeenNode(name=name, alive=starting, seen_unix=launch.unix)
        alive = record.pid in living if living is not None else now - record.beat_unix < SILENCE_S
        node = _from_record(name, record, alive)
        halted = living is not None and node.alive and processes.is_stopped(record.pid)
        return replace(node, halted=f"the agent (process {node.pid})") if halted else node


class SlurmJobs:
    """The jobs of a run on Slurm. A node lives as long as its job does; what its file says last is its own word."""

    patience_s = SUBMISSION_S

    def __init__(self, files: RunFiles, answers: Answers) -> None:
        self._files = files
        self.jobs = () if files.done else tuple(_jobs(files, answers))

    def nodes(
        self, records: Records, start: Start, launch: Launch, now: float
    ) -> tuple[tuple[SeenNode, ...], tuple[Job, ...]]:
        """The nodes in the newest start, and the jobs with what the nodes say of them."""
        nodes = [self._node(name, record, start, launch, now) for name, record in records.items()]
        if self.jobs and start.restarts == 0:  # what was said then may stand there still
            unseen = self._unseen()
            nodes = [_with_unseen(node, unseen.get(node.name), launch.unix) for node in nodes]
        by = {job: node.name for node in nodes for job in node.withdrew}
        return tuple(nodes), tuple(_withdrawn(job, by[job.id]) if job.id in by else job for job in self.jobs)

    def _node(self, name: str, record: NodeRecord | None, start: Start, launch: Launch, now: float) -> SeenNode:
        """Where Slurm knows no job of the node, which may be because it shows users their own jobs only, signs of life
        must do. A node that never came is thought of last: its job may have been cancelled because another one failed.
        """
        own = [job for job in self.jobs if name in job.nodes]
        # An elastic run's node may have come back in a job of its own.
        job = next((job for job in own if record is not None and job.id == record.job), own[0] if own else None)
        beats = record is not None and now - record.beat_unix < SILENCE_S
        alive = launch.submitting if job is None else not job.over
        if record is not None and record.of == start:
            node = _from_record(name, record, beats if job is None or job.state is None else alive)
        else:
            node = SeenNode(name=name, alive=alive, seen_unix=now, job=job.id if job else None, host=_host(name, job))
        # The job of an elastic run outlives nodes of it.
        was_here = record is not None and record.of.submission == self._files.submitted.submission
        silent = self._files.plan.elastic is not None and was_here and not beats
        return replace(node, alive=False) if silent else node

    def _unseen(self) -> dict[str, Unseen]:
        """The nodes that do not see the run's folder, by their names, as far as that is known."""
        run, plan, known = self._files.run, self._files.plan, self._files.submitted.by_id
        found: dict[str, Unseen] = {}
        for job in (job for job in self.jobs if job.id in known):
            nodes, hosts = known[job.id].nodes, job.state.hosts if job.state else ()
            found |= {**unlaunched(run, job.id, job.nodes, job.state), **not_started(run, plan, job.id, nodes, hosts)}
        return found


Executor = Processes | SlurmJobs


def _jobs(files: RunFiles, answers: Answers) -> Iterator[Job]:
    """The jobs that were written down, and one that only its comment shows."""
    for job in files.submitted.jobs:
        state: JobState | None
        if isinstance(answers, LaunchError):
            state = JobState(id=job.id or "?", state="UNKNOWN", detail="Slurm does not answer")
        else:
            state = answers.get(job.id or slurm_commands.comment_of(files.submitted.token))
        known = job.id or (state.id if state else None)
        if job.joins and (state is None or state.pending):  # the run does not wait for it
            continue
        if known is not None:
            yield Job(id=known, nodes=tuple(files.names[rank] for rank in job.nodes), state=state)


def _with_unseen(node: SeenNode, unseen: Unseen | None, submitted_unix: float) -> SeenNode:
    """Marks a node that does not see the folder: it never comes, and was the first thing that went wrong."""
    if unseen is None or node.state != "absent":
        return node
    return replace(node, alive=False, seen_unix=submitted_unix, unseen=unseen)


def _withdrawn(job: Job, node: str) -> Job:
    """A job that a node took out of the queue, if it was there."""
    if job.state is None or job.state.state != "CANCELLED":
        return job
    detail = f"removed from the queue by node {node}"
    return replace(job, withdrawn=True, state=replace(job.state, detail=detail))


def _host(name: str, job: Job | None) -> str | None:
    """Where Slurm runs, or will run, a node's agent."""
    hosts = job.state.hosts if job is not None and job.state is not None else ()
    return hosts[job.nodes.index(name)] if job is not None and len(hosts) == len(job.nodes) else None


def _names_here(files: RunFiles) -> set[str]:
    """The nodes whose processes can be looked for: of a run on this machine all of them, or none."""
    run, submitted, names = files.run, files.submitted, files.names
    if not submitted.on_hosts:
        return set(names) if is_here(run, submitted.jobs) else set()
    own = [job for job in submitted.jobs if job.host == socket.gethostname() and job.boot in (None, processes.boot())]
    return {names[rank] for job in own if has_rights_of(owner_of(run)) for rank in job.nodes}


def is_here(run: RunDir, jobs: Iterable[JobRecord]) -> bool:
    """Whether the run's processes are on this machine and this user sees them, so that they can be looked for.

    A run may have been resumed on another machine than it was first started on.
    """
    host = next((job.host for job in jobs if job.host is not None), None)
    if host is None:
        origin = Faults().tried(lambda: run.read(run.provenance, Origin), None)
        host = None if origin is None else origin.host
    return bool(host == socket.gethostname() and has_rights_of(owner_of(run)))


def _from_record(name: str, record: NodeRecord, alive: bool) -> SeenNode:
    same = SeenNode.__dataclass_fields__.keys() & NodeRecord.__dataclass_fields__.keys()
    return SeenNode(
        name=name,
        alive=alive and record.state != "ended",
        halted="the worker" if record.worker_stopped else None,
        seen_unix=record.ended_unix or record.beat_unix,
        **{field: getattr(record, field) for field in same},
    )
