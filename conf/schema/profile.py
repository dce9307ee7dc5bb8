"""What is recorded of a run while it trains, trackers that receive its metrics, and who hears of its end."""

from __future__ import annotations

import re
import shlex
from enum import StrEnum

from conf.errors import ConfigError, reworded
from conf.schema.values import ranges
from conf.schema.values.ranges import config
from megatron_ext.contract.keys import COUNT, Range, option


class Tracker(StrEnum):
    """Each is written by a process of its own, beside the node agent of the last rank (docs/trackers.md)."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


@config
class Notify:
    command: str | None = None
    """A program with arguments to start when the run has ended; TDPP_STATE and other variables describe the end."""
    webhook: str | None = None
    """Name of a shell variable with an address, to which the verdict is sent by POST as JSON."""
    mail: str | None = None
    """With Slurm: address for Slurm's mail when the run's first job ends or fails."""

    def __post_init__(self) -> None:
        if self.command is not None and not _words(self.command):
            raise ConfigError("notify.command='' is empty; give a program, or null")
        if self.words and "/" in self.words[0] and not self.words[0].startswith("/"):
            raise ConfigError(
                f"notify.command={self.command!r}: {self.words[0]} is a relative path, but the program is started in "
                f"the run's folder; give its full path"
            )
        if self.webhook is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.webhook):
            raise ConfigError(  # without the value: it would be the secret
                "notify.webhook takes the name of a variable, because the address is a secret and must not appear in "
                "the run's files and pages; export it (export TDPP_WEBHOOK=…) and give notify.webhook=TDPP_WEBHOOK"
            )
        if self.mail is not None and not re.fullmatch(r"[^\s@,]+@[^\s@,]+(,[^\s@,]+@[^\s@,]+)*", self.mail):
            raise ConfigError(
                f"notify.mail={self.mail!r} must be an address, such as me@example.org, or several: "
                "'notify.mail=\"me@example.org,you@example.org\"'"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command; none without one."""
        return () if self.command is None else _words(self.command)


def _words(command: str) -> tuple[str, ...]:
    with reworded(ConfigError, f"notify.command={command!r} cannot be read: ", "; close its quotes", of=ValueError):
        return tuple(shlex.split(command))


@config
class Profile:
    timeline: bool = True
    """Record when each rank does what (events/rank-*.bin)."""
    nsys: bool = False
    """Run the ranks of every node under Nsight Systems, which must be installed on the node or in its container."""
    ncu: bool = False
    """The same under Nsight Compute, which runs every kernel except NCCL's several times to measure it."""
    trace_iteration: int | None = option(None, COUNT)
    """The iteration for which the first rank of each stage writes a torch profiler trace (traces/) for Perfetto; with
    nsys on GPUs, Nsight Systems captures only this iteration instead; null: none."""
    gpu_interval_s: int = option(10, Range(0, 10**6))
    """Seconds between two readings of the GPUs (nodes/<node>.gpu); 0: none."""

    def __post_init__(self) -> None:
        ranges.check("profile", self)
        if self.nsys and self.ncu:
            raise ConfigError(
                "profile.nsys=true and profile.ncu=true: a process runs under one profiler at a time; set one to false"
            )
        if self.ncu and self.trace_iteration is not None:
            raise ConfigError(
                f"profile.trace_iteration={self.trace_iteration} must be null with profile.ncu=true, under which torch "
                "traces nothing; set train.iterations to profile few iterations"
            )
