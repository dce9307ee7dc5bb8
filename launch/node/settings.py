"""What a launch tells the agents of a job's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conf.run_folder.rundir import RunDir
from conf.schema.trackers import Tracker
from launch.machine.container_commands import RunContainer
from launch.node.worker_command import Worker


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Of all nodes of a job."""

    run: RunDir
    model: str
    """The model's name, for the log."""
    environment: Mapping[str, str]
    """Given to the worker."""
    environment_from: tuple[str, ...] = ()
    """Names of what the worker is given as this agent has it, from the shell that launched the run."""
    worker: Worker
    container: RunContainer | None
    nodes: tuple[int, ...]
    """Node ranks, by task of the job."""
    het_groups: tuple[int | None, ...]
    """By task: the component of a heterogeneous job that the node is of; None in any other job."""
    submission: int
    """How often the run had been submitted before."""
    resumable: bool
    """Whether the run saves checkpoints from which it can go on."""
    group_writes: bool = False
    """Whether the group of the run's folder may write what the worker and its ranks write."""
    meet_s: float
    """How long this node waits for the others to start."""
    save_s: float
    """How long after SIGUSR2 the node will be ended by force."""
    max_requeues: int
    gpu_interval_s: int = 0
    """Seconds between two readings of the node's GPUs; 0 for none."""
    trackers: tuple[Tracker, ...] = ()
    """That the node of the last rank, which logs, has written."""
    for_itself: bool = False
    """Whether the node is examined for itself (tdpp doctor): although others have failed its worker starts, is told so
    (SIGTERM), and ends by itself."""
