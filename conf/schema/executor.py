"""Where and how long a run goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from conf.errors import ConfigError
from conf.schema.values import ranges
from conf.schema.values.ranges import config
from megatron_ext.contract.keys import Range, between, option, positive

MOST_RANKS = 1024
"""The most ranks of a host, as of a node of a cluster."""
_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*):(?:(?P<ranks>[0-9]{1,6})|gpu(?P<gpus>[0-9]{1,4}(?:\+[0-9]{1,4})*))"
)


@dataclass(frozen=True)
class Host:
    """A node of the plan."""

    name: str
    """The name by which ssh reaches it."""
    ranks: int
    gpus: tuple[int, ...] | None = None
    """Numbers of the GPUs that its ranks use, in their order; None for the first ones."""

    @classmethod
    def parse(cls, text: str, key: str) -> Host:
        """From `NAME:RANKS`, or `NAME:gpu0+3`, which `key` has. Raises ConfigError: it is neither."""
        found = _HOST.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{key}: {text!r} is not a host; write NAME:RANKS, such as a:2, or NAME:gpu0+3 for exact "
                "GPUs. NAME is a name for ssh; put a user, a port or a key into ~/.ssh/config"
            )
        if found["gpus"] is None:
            ranks = int(found["ranks"])
            if not 1 <= ranks <= MOST_RANKS:
                raise ConfigError(f"{key}: {text!r}: a host runs 1 to {MOST_RANKS} ranks")
            return cls(found["name"], ranks)
        gpus = tuple(map(int, found["gpus"].split("+")))
        if len(set(gpus)) < len(gpus):
            raise ConfigError(f"{key}: {text!r} names a GPU twice; each rank needs its own GPU")
        return cls(found["name"], len(gpus), gpus)


def hosts(texts: Sequence[str], key: str = "executor.hosts") -> tuple[Host, ...]:
    """All of them; raises ConfigError for one that is none, or is named twice."""
    found = tuple(Host.parse(text, key) for text in texts)
    names = [host.name for host in found]
    for name in names:
        if names.count(name) > 1:
            ranks = sum(host.ranks for host in found if host.name == name)
            raise ConfigError(f"{key} names {name} twice; give all its ranks at once, such as {name}:{ranks}")
    return found


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
    after: str | None = None
    """With Slurm: a run that must have succeeded before this one starts, by its name or folder."""

    def __post_init__(self) -> None:
        ranges.check("executor", self)
        if not self.reached and self.kind is ExecutorKind.hosts:
            raise ConfigError(
                "executor.kind=hosts needs executor.hosts: the names of the machines for ssh, each with its number of "
                "ranks, such as executor.hosts=[a:2,b:2]"
            )

        if self.after is not None and self.kind is not ExecutorKind.slurm:
            raise ConfigError(
                f"executor.after={self.after}: only Slurm's queue waits for another run, and executor.kind={self.kind} "
                "has none; start this one when the other has ended, or use executor=slurm"
            )

    @property
    def reached(self) -> tuple[Host, ...]:
        """The hosts that ssh reaches, by node rank; none with another kind. Raises ConfigError: one is written in
        another way, or named twice."""
        return hosts(self.hosts) if self.kind is ExecutorKind.hosts else ()

    @property
    def followed(self) -> bool:
        """Whether `tdpp launch` stays with a run until that ends."""
        return self.wait and self.kind is not ExecutorKind.slurm
