"""Where and how long a run goes."""

from __future__ import annotations

from enum import StrEnum

from conf.schema import ranges
from conf.schema.config_class import config


class ExecutorKind(StrEnum):
    local = "local"
    slurm = "slurm"


class Het(StrEnum):
    """How a heterogeneous cluster is asked for: two coupled jobs, or one Slurm heterogeneous job."""

    jobs = "jobs"
    hetjob = "hetjob"


class Rehearse(StrEnum):
    """Whether time passes instead of computing, and by which clock (megatron_ext/engine/rehearsal.py)."""

    none = "none"
    virtual = "virtual"
    """Nobody waits: exact, and over in a moment."""
    anchored = "anchored"
    """Lasts as long as the real run would."""


@config
class Executor:
    kind: ExecutorKind = ExecutorKind.local
    het: Het = Het.jobs
    rehearse: Rehearse = Rehearse.none
    """Local only: go through the plan on this machine with the times that the GPUs' profiles give."""
    wait: bool = True
    """Local only: follow the run until it ends. false returns as soon as it was started."""
    master_port: int | None = None
    """null: a free port, which rank 0's node chooses and publishes."""
    time_min: int = 60 * 24
    """Local only: minutes after which the run is ended."""
    meet_min: float = 10
    """Minutes that nodes wait for the others before the run fails: those of another job may start later."""
    save_s: int = 120
    """This long before its time limit a run saves a checkpoint and ends; on Slurm it is then started again."""
    max_requeues: int = 3
    """Slurm only: how often a job is started again after its time limit, a preemption or the failure of a node."""

    def __post_init__(self) -> None:
        ranges.check("executor", self)
