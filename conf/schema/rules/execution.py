"""What goes with where a run is executed: on Slurm, on hosts, on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from conf.errors import ConfigError
from conf.schema.cluster import Cluster
from conf.schema.executor import Executor
from conf.schema.notify import Notify


def check_rehearsal(executor: Executor) -> None:
    """A rehearsal runs on this machine alone."""
    if executor.rehearse != "none" and executor.kind != "local":
        raise ConfigError(
            f"executor.rehearse={executor.rehearse} rehearses the plan on this machine, but "
            f"executor.kind={executor.kind}; use executor=local, or executor.rehearse=none"
        )


def check_time(executor: Executor, cluster: Cluster, groups: Iterable[str]) -> None:
    """Whether the time limit of each node group leaves time to train before Slurm's warning, whose lead is fixed."""
    if executor.kind != "slurm":
        return
    for name in dict.fromkeys(groups):
        limit, save_s = cluster.groups[name].time_min, executor.save_s
        if limit is not None and limit * 60 <= save_s:
            raise ConfigError(
                f"cluster.groups.{name}.time_min={limit} minutes is not longer than executor.save_s={save_s} seconds, "
                f"so the run would save and end at once; give it at least {save_s // 60 + 1} minutes, or use a smaller "
                f"executor.save_s"
            )


def check_notify(notify: Notify, executor: Executor) -> None:
    """Whether somebody can be told in this way."""
    if notify.mail is not None and executor.kind != "slurm":
        raise ConfigError(
            f"notify.mail={notify.mail} needs Slurm, which sends the mail, but "
            f"executor.kind={executor.kind}; use "
            "notify.command or notify.webhook"
        )
