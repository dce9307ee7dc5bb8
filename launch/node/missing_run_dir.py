"""Nodes that do not see a run's folder: what Slurm, and the shell that should have started an agent, say of them.

Nothing of such a node can come through the folder. Where it is the first node of a job, Slurm cannot open the job's
output there, and does not launch it. On any other node the shell complains to srun, whose output the first node keeps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import RunFolderError
from conf.run_folder.run_files import read_text
from conf.run_folder.rundir import RunDir
from launch.machine.job_states import LAUNCH_FAILURE, JobState
from megatron_ext.contract.plan import Plan


@dataclass(frozen=True)
class Unseen:
    """A node that does not see the folder, or may not write there."""

    host: str
    """Its name; empty if Slurm does not say."""
    why: str

    def message(self, runs_dir: str) -> str:
        """What is wrong with the node, and the way out."""
        host = self.host or "its host"
        return f"{host} cannot see or write to runs_dir={runs_dir} ({self.why}); choose a folder that all nodes share"


def unlaunched(run: RunDir, job: str, names: Sequence[str], state: JobState | None) -> dict[str, Unseen]:
    """The first node of a job that Slurm could not launch and that left nothing in the folder. `names` are the job's
    nodes by task."""
    if state is None or state.detail != LAUNCH_FAILURE or (run.submitit / f"{job}_batch.out").exists():
        return {}
    why = f"Slurm could not launch job {job} there, and the folder has nothing of it"
    return {names[0]: Unseen(next(iter(state.hosts), ""), why)}


def not_started(
    run: RunDir, plan: Plan, job: str, nodes: Sequence[int], hosts: Sequence[str] = ()
) -> dict[str, Unseen]:
    """The nodes of a job whose agent could not open its output; `nodes` are node ranks, and like `hosts` by task."""
    try:
        log = read_text(run.submitit / f"{job}_batch.out", errors="replace")
    except (FileNotFoundError, RunFolderError):
        return {}
    components = len({plan.nodes[rank].group for rank in nodes})  # each of which may have an id of its own
    found = {}
    for number, task, why in re.findall(
        rf"{re.escape(str(run.submitit))}/(\d{{1,18}})_(\d{{1,9}})_log\.out: (.+)", log
    ):
        if int(task) < len(nodes) and 0 <= int(number) - int(job) < components:
            host = hosts[int(task)] if len(hosts) == len(nodes) else ""
            found[plan.nodes[nodes[int(task)]].name] = Unseen(host, why.strip())
    return found
