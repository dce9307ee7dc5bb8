"""Which of a run's nodes Slurm would start now (`elastic.start=now`)."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from conf.schema.experiment import Experiment
from launch.control.executors.sbatch import JobRequest, Submission, component, sbatch_text
from launch.errors import LaunchError
from launch.machine import slurm_commands
from launch.machine.slurm_commands import SlurmSilent
from megatron_ext.contract.files import write_atomic

NOW_S = 60.0
"""What starts within this time starts now."""


def expected_start(request: JobRequest, folder: Path) -> float:
    """When Slurm would start a job, in seconds since 1970; nothing is submitted.

    Raises:
        SlurmSilent: Slurm does not answer.
        LaunchError: it would not start it, or does not say when.
    """
    submission = Submission(
        name="tdpp", comment="tdpp start=now", python=sys.executable, folder=folder, path="", save_s=120, requeue=False
    )
    script = folder / "job.sh"
    write_atomic(script, sbatch_text(submission, request, after=None))
    start = slurm_commands.test(str(script))
    if start is None:
        raise LaunchError("Slurm says no time")
    return start


def free_now(experiment: Experiment) -> list[int]:
    """The nodes that a run could have now, by node rank: of each group as many as Slurm would start at once. Raises
    LaunchError: they are fewer than `elastic.min_nodes`, or Slurm does not answer."""
    groups = experiment.node_order.groups
    found: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(groups):
            ranks = [rank for rank, group in enumerate(groups) if group == name]
            low, high = 0, len(ranks)
            while low < high:
                count = (low + high + 1) // 2
                if _starts_now(experiment, name, tuple(ranks[:count]), Path(folder)):
                    low = count
                else:
                    high = count - 1
            found += ranks[:low]
    least = experiment.elastic.min_nodes
    if len(found) < least:
        raise LaunchError(
            f"elastic.start=now: Slurm would start {len(found)} of the {len(groups)} nodes now, and elastic.min_nodes="
            f"{least} are needed; leave elastic.start out to wait for all of them"
        )
    return sorted(found)


def _starts_now(experiment: Experiment, group: str, ranks: tuple[int, ...], folder: Path) -> bool:
    request = JobRequest(role="job", components=(component(group, experiment.cluster, ranks),))
    try:
        return expected_start(request, folder) < time.time() + NOW_S
    except SlurmSilent as error:
        raise LaunchError(f"elastic.start=now: Slurm does not answer: {error}; try again") from error
    except LaunchError:  # more nodes than are up
        return False
