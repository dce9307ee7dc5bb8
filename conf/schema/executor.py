"""Where and how long a run goes."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from conf.schema.hosts import Host, hosts


class ExecutorKind(StrEnum):
    """Who starts the ranks."""

    local = "local"
    slurm = "slurm"
    hosts = "hosts"


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
    hosts: list[str] = field(default_factory=list)
    """Hosts only: the plan's nodes in their order, each as `NAME:RANKS`, or `NAME:gpu0+3` for exact GPUs. ssh reaches
    a host by its name."""
    het: Het = Het.jobs
    rehearse: Rehearse = Rehearse.none
    """Local only: go through the plan on this machine with the times that the GPUs' profiles give."""
    noise: str | None = None
    """In a rehearsal with adapt.rule: the noise scale that its measurements find, in samples. One number, two joined by
    a comma (at the beginning and at the end), or a CSV file with the columns samples and noise_scale."""
    wait: bool = True
    """Not on Slurm: follow the run until it ends. false returns as soon as it was started."""
    master_port: int | None = None
    """null: a free port, which rank 0's node chooses and publishes."""
    time_min: int = 60 * 24
    """Not on Slurm: minutes after which the run is ended."""
    meet_min: float = 10
    """Minutes that nodes wait for the others before the run fails: those of another job may start later."""
    save_s: int = 120
    """This long before its time limit a run saves a checkpoint and ends; on Slurm it is then started again."""
    max_requeues: int = 3
    """Slurm only: how often a job is started again after its time limit, a preemption or the failure of a node."""

    def __post_init__(self) -> None:
        ranges.check("executor", self)
        if not self.reached and self.kind is ExecutorKind.hosts:
            raise ConfigError(
                "executor.kind=hosts needs executor.hosts, the names by which ssh reaches them and how many ranks each "
                "runs, such as executor.hosts=[a:2,b:2]"
            )

    @property
    def reached(self) -> tuple[Host, ...]:
        """The hosts that ssh reaches, by node rank; none with another kind.

        Raises:
            ConfigError: one is written in another way, or named twice.
        """
        return hosts(self.hosts) if self.kind is ExecutorKind.hosts else ()

    @property
    def followed(self) -> bool:
        """Whether `tdpp launch` stays with a run until that ends."""
        return self.wait and self.kind is not ExecutorKind.slurm
