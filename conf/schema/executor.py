"""Where and how long a run goes."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema.config_class import config
from conf.schema.values import ranges
from conf.schema.values.hosts import Host, hosts
from megatron_ext.contract.keys import Range, between, option, positive


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
    """In virtual time: exact, and over in a moment."""
    anchored = "anchored"
    """In real time: it takes as long as the real run would."""


@config
class Executor:
    kind: ExecutorKind = ExecutorKind.local
    hosts: list[str] = field(default_factory=list)
    """With executor.kind=hosts: the machines in the order of the plan's nodes, each as `NAME:RANKS`, or `NAME:gpu0+3`
    for exact GPUs. NAME is a name for ssh."""
    het: Het = Het.jobs
    rehearse: Rehearse = Rehearse.none
    """With executor.kind=local: rehearse the plan on this machine, with times from the GPUs' profiles."""
    noise: str | None = None
    """In a rehearsal with adapt.rule: the noise scale to measure, in samples. One number, two separated by a comma (at
    the beginning and at the end), or a CSV file with the columns samples and noise_scale."""
    wait: bool = True
    """Without Slurm: follow the run until it ends. false returns as soon as it has started."""
    master_port: int | None = option(None, between(1024, 65535))
    """Port on which ranks meet; null: a free port that rank 0's node chooses and publishes."""
    time_min: int = option(60 * 24, Range(1, 10**7))
    """Without Slurm: time limit of the run, in minutes."""
    meet_min: float = option(10, positive(10**7))
    """Minutes that nodes wait for the others before the run fails; nodes of another job may start later."""
    save_s: int = option(120, between(10, 65535))
    """Seconds before its time limit at which a run saves a checkpoint and ends; on Slurm it is then started again."""
    max_requeues: int = option(3, Range(0, 10**6))
    """With Slurm: how often a job is started again after its time limit, a preemption or a node failure."""

    def __post_init__(self) -> None:
        ranges.check("executor", self)
        if not self.reached and self.kind is ExecutorKind.hosts:
            raise ConfigError(
                "executor.kind=hosts needs executor.hosts: the names of the machines for ssh, each with its number of "
                "ranks, such as executor.hosts=[a:2,b:2]"
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
