"""What a run's own files tell at first sight: whether, and about which jobs, Slurm has to be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import RunFolderError
from conf.rundir import RunDir
from launch.launching import is_launching
from launch.start import Start
from megatron_ext.plan import check
from megatron_ext.plan_check import PlanFault

_PLAN = (
    *("version", "run", "tensor", "data", "pipeline", "partition", "micro_batch_size", "global_batch_size"),
    *("nodes", "ranks", "train", "device", "rehearsal"),
)
_JOBS = ("token", "executor", "submission", "jobs")
_STATE = (
    *("start", "job", "pid", "started_unix", "state", "beat_unix", "ended_unix", "exit_code", "stopped", "reason"),
    *("out_begin", "err_begin"),
)
"""What is read of the run's files (docs/formats.md)."""


@dataclass(frozen=True, kw_only=True)
class Glance:
    """What a run's own files tell before Slurm or this machine's processes are looked at."""

    run: RunDir
    plan: dict[str, Any]
    submitted: dict[str, Any]
    """jobs.json."""
    launching: bool | None
    """Whether the jobs that are missing in it may still come: the run is being launched. None if that is not known."""
    states: dict[str, Any]
    """nodes/<node>.json by the node's name, None where there is none."""

    @property
    def names(self) -> list[str]:
        return [node["name"] for node in self.plan["nodes"]]

    @property
    def first(self) -> Start:
        """The first start since the last submission."""
        return Start(self.submitted["submission"], 0)

    @property
    def launched(self) -> set[int]:
        """Ranks of the nodes whose jobs are known."""
        return _launched(self.submitted)

    @property
    def on_slurm(self) -> bool:
        return bool(self.submitted["executor"] == "slurm")

    @property
    def settled(self) -> bool:
        """Whether every node's agent has told its end, all in the same start; nothing more is to be seen then."""
        starts = {state and state["start"] for state in self.states.values()}
        ended = all(state and state["state"] == "ended" for state in self.states.values())
        return ended and len(starts) == 1 and Start.parse(starts.pop()) >= self.first

    @property
    def asks(self) -> tuple[str, ...]:
        """Ids of the jobs that Slurm has to be asked about; none once the files tell all."""
        # Where nodes were ended from outside, Slurm may know by whom, and start them again.
        cut = any(state and state["stopped"] for state in self.states.values()) and not self.run.stop_request.exists()
        if not self.on_slurm or (self.settled and not cut):
            return ()
        return tuple(job["id"] for job in self.submitted["jobs"] if job["id"] is not None)

    @property
    def unrecorded(self) -> bool:
        """Whether a job may be in Slurm's queue whose id nobody wrote down: its launch was cut off just then."""
        return self.on_slurm and not self.settled and any(job["id"] is None for job in self.submitted["jobs"])


def glance(run: RunDir) -> Glance:
    """Raises RunFolderError if a file of the run is not what it should be."""
    plan = run.read_object(run.plan, _PLAN)
    submitted = _submitted(run)
    if plan is None or submitted is None:
        lacking = run.plan if plan is None else run.jobs
        raise RunFolderError(f"{run.path} is not a run: {lacking.name} is not there")
    try:
        check(plan, whole=False)
    except PlanFault as fault:
        raise RunFolderError(f"{run.plan}: {fault}") from fault
    launching: bool | None = False
    if len(_launched(submitted)) < len(plan["nodes"]):
        launching = is_launching(run)
        submitted = _submitted(run) or submitted  # a launch that is over by now has named all jobs
    return Glance(run=run, plan=plan, submitted=submitted, launching=launching, states=states_of(run, plan))


def _submitted(run: RunDir) -> dict[str, Any] | None:
    return run.read_object(run.jobs, _JOBS)


def _launched(submitted: Mapping[str, Any]) -> set[int]:
    return {node for job in submitted["jobs"] if job["id"] is not None for node in job["nodes"]}


def states_of(run: RunDir, plan: Mapping[str, Any]) -> dict[str, Any]:
    return {node["name"]: run.read_object(run.node_state(node["name"]), _STATE) for node in plan["nodes"]}
