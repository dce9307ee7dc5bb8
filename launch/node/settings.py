"""What a launch tells the agents of a job's nodes: a JSON file that only the run's user can have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from conf.errors import RunFolderError, reworded
from conf.run_folder.json_values import plain, typed
from conf.run_folder.rundir import RunDir
from conf.schema.profile import Tracker
from launch.errors import LaunchError
from launch.files.own_path import own_folder
from launch.machine.container_runtimes import RunContainer
from launch.node.worker_command import Worker


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What the agents of all nodes of a job are to do."""

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
    """The component of a heterogeneous job that each task's node belongs to; None in any other job."""
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

    def to_json(self) -> str:
        return json.dumps(plain(self), indent=1) + "\n"

    @classmethod
    def read(cls, run: RunDir, name: str, *, group: bool) -> NodeSettings:
        """What the file `name` in the run's `submitit/` says. It is opened once, through handles of folders that are
        this user's own; `group` as for `own_folder`.

        Raises:
            LaunchError: somebody else could have written it, or it is none of this version's.
        """
        path = str(run.submitit / name)
        with own_folder(run.path, run.submitit.name, group=group) as own:
            content = own.read(name)
        with reworded(LaunchError, f"{path}: ", "; launch the run again", of=(ValueError, RunFolderError)):
            settings = typed(cls, json.loads(content), path)
        if settings.run != run:
            raise LaunchError(f"{path} is of another run, {settings.run.path}; launch the run again")
        return settings
