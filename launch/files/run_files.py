"""What a run's own files say, what of them cannot be read, and what its agents printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from conf.errors import ClosedError, RunFolderError
from conf.run_folder.run_files import entries, read_tail
from conf.run_folder.rundir import RunDir
from launch.files.locks import is_launching
from launch.files.records import JobRecord, JoinRecord, NodeRecord, Start, Submitted
from megatron_ext.contract.plan import Plan

T = TypeVar("T")
Other = TypeVar("Other")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of them."""

    text: str
    """The file, and what is wrong with it."""
    closed: bool
    """Whether no more is wrong than that this user may not read it."""
    decisive: bool
    """Whether no verdict can be given without it."""


class Faults(list[Fault]):
    """Those that were found so far, each once."""

    def tried(self, read: Callable[[], T], otherwise: Other, *, decisive: bool = False) -> T | Other:
        """What `read` returns; where it raises RunFolderError, that is noted."""
        try:
            return read()
        except RunFolderError as error:
            self.add(str(error), closed=isinstance(error, ClosedError), decisive=decisive)
            return otherwise

    def tail(self, path: Path, size: int, begin: int = 0, *, decisive: bool = False) -> bytes:
        """The whole lines among the last `size` bytes of a file that may not be there yet, none from before `begin`."""
        try:
            content, cut = self.tried(lambda: read_tail(path, size, begin), (b"", False), decisive=decisive)
        except FileNotFoundError:
            return b""
        return content.partition(b"\n")[2] if cut else content

    def add(self, text: str, *, closed: bool = False, decisive: bool = False) -> None:
        fault = Fault(text=text, closed=closed, decisive=decisive)
        if fault not in self:
            self.append(fault)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run's own files say before Slurm or this machine's processes are looked at."""

    run: RunDir
    plan: Plan
    submitted: Submitted
    launching: bool | None
    """Whether the jobs that are missing in it may still come: the run is being launched. None if that is not known."""
    states: dict[str, NodeRecord | None]
    """The records of the nodes that take part, by name; None where there is none, or none that can be read."""
    faults: tuple[Fault, ...]
    """What is wrong with the records."""
    planned: Start
    """The newest start that the files of plans know of."""

    @property
    def names(self) -> list[str]:
        """The names of all nodes, by node rank; of an elastic run also of those that take no part."""
        return self.plan.node_names

    @property
    def settled(self) -> bool:
        """Whether every node's agent has written its end, all in the same start; nothing more is to be seen then."""
        states = [state for state in self.states.values() if state is not None and state.state == "ended"]
        starts = {state.of for state in states}
        return len(states) == len(self.states) and len(starts) == 1 and starts.pop() >= self.submitted.first

    @property
    def asks(self) -> tuple[str, ...]:
        """Ids of the jobs that Slurm has to be asked about; none once the files say all."""
        # Where nodes were ended from outside, Slurm may know by whom, and start them again.
        cut = any(state and state.stopped for state in self.states.values()) and not self.run.stop_request.exists()
        if not self.submitted.on_slurm or (self.settled and not cut):
            return ()
        return tuple(job.id for job in self.submitted.jobs if job.id is not None)

    @property
    def done(self) -> bool:
        """Whether nothing of the nodes can change any more, so that neither processes nor jobs are looked at."""
        return self.settled and not self.asks

    @property
    def unrecorded(self) -> bool:
        """Whether a job may be in Slurm's queue whose id nobody wrote down: its launch was cut off just then."""
        return self.submitted.on_slurm and not self.settled and any(job.id is None for job in self.submitted.jobs)


def read_run_files(run: RunDir) -> RunFiles:
    """Raises RunFolderError if plan.json or jobs.json is not what it should be; of the nodes' files it is noted."""
    plan = run.read_plan()
    submitted = read_submitted(run, len(plan.nodes))
    launching: bool | None = False
    if len(submitted.launched) < len(plan.nodes):
        launching = is_launching(run)
        submitted = read_submitted(run, len(plan.nodes))  # a launch that is over by now has named all jobs
    faults = Faults()
    states = states_of(run, plan, faults)
    planned = submitted.first if plan.elastic is None else planned_start(run, submitted.submission)
    return RunFiles(
        run=run,
        plan=plan,
        submitted=submitted,
        launching=launching,
        states=states,
        faults=tuple(faults),
        planned=planned,
    )


def planned_start(run: RunDir, submission: int) -> Start:
    """The newest start of an elastic run's submission that has a plan; the first one has plan.json."""
    start = Start(submission, 0)
    while run.plan_of(str(start.next)).exists():
        start = start.next
    return start


def read_submitted(run: RunDir, nodes: int) -> Submitted:
    """jobs.json of a run with so many nodes; raises RunFolderError if it is not what it should be."""
    submitted = run.read(run.jobs, Submitted)
    if submitted is None:
        raise RunFolderError(f"{run.path} is not a run: it has no {run.jobs.name}")
    for number, job in enumerate(submitted.jobs):
        if any(node >= nodes for node in job.nodes) or len(set(job.nodes)) < len(job.nodes) or not job.nodes:
            raise RunFolderError(
                f"{run.jobs} is damaged: jobs[{number}].nodes={list(job.nodes)} must be nodes between 0 and {nodes - 1}"
            )
    known = (one for one in read_joins(run, submitted.submission) if one.id is not None and one.node < nodes)
    joins = (JobRecord(id=one.id, nodes=(one.node,), joins=True) for one in known)
    return replace(submitted, jobs=(*submitted.jobs, *joins))


def read_joins(run: RunDir, submission: int) -> list[JoinRecord]:
    """The jobs that an elastic run's agents submitted for lost nodes, in the order of their starts."""
    found = [run.read(path, JoinRecord) for path in entries(run.joins) if path.suffix == ".json"]
    own = [one for one in found if one is not None and Start.parse(one.start).submission == submission]
    return sorted(own, key=lambda one: (Start.parse(one.start), one.node))


def states_of(run: RunDir, plan: Plan, faults: Faults) -> dict[str, NodeRecord | None]:
    """nodes/<node>.json of those that take part, by the node's name; one that cannot be read is noted, and is as if it
    were not there."""
    return {plan.nodes[rank].name: _state(run, plan.nodes[rank].name, faults) for rank in plan.used}


def _state(run: RunDir, name: str, faults: Faults) -> NodeRecord | None:
    return faults.tried(lambda: run.read(run.node_state(name), NodeRecord), None, decisive=True)


def agent_logs(run: RunDir, plan: Plan, submitted: Submitted) -> dict[str, list[Path]]:
    """The files by node, and by job those of its script; `submitted` is jobs.json.

    `<job>_<task>_log.out` is an agent's; of a heterogeneous job each component has an id of its own, counted on from
    the whole job's, while tasks are counted through. Without Slurm its errors are in a file of their own, and where ssh
    reaches the nodes each has a folder.

    Raises:
        RunFolderError: the folder of these files cannot be listed.
    """
    names = plan.node_names
    if submitted.on_hosts:
        own = {
            name: [path for path in entries(run.submitit_of(name)) if path.name.endswith(("_log.out", "_log.err"))]
            for name in names
        }
        return {name: paths for name, paths in own.items() if paths}
    paths = [path for path in entries(run.submitit) if "." in path.name]
    found: dict[str, list[Path]] = {name: [] for name in names}
    for job, record in submitted.by_id.items():
        components = len({plan.nodes[node_rank].group for node_rank in record.nodes})
        ids = {str(int(job) + component) for component in range(components)}
        tasks = {str(task): names[node_rank] for task, node_rank in enumerate(record.nodes)}
        for path in paths:
            number, _, rest = path.name.partition("_")
            task, _, kind = rest.partition("_")
            if number in ids and task in tasks and kind in ("log.out", "log.err"):
                found[tasks[task]].append(path)
            elif number in ids and rest == "batch.out":
                found.setdefault(f"job {job}", []).append(path)
    return {source: paths for source, paths in found.items() if paths}
