"""What goes with where a run is executed, on Slurm, on hosts or on this machine, and what a sweep needs of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conf.errors import ConfigError
from conf.schema.cluster import Cluster
from conf.schema.engine import Engine, EngineKind
from conf.schema.executor import Executor
from conf.schema.profile import Notify
from conf.schema.train import Train


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


def check_jobs(max_jobs: int | None, executor: Executor) -> None:
    """Whether so many runs at a time can be kept to."""
    if max_jobs is None:
        return
    if executor.kind != "slurm" and not executor.wait:
        where = "this machine" if executor.kind == "local" else "the hosts"
        raise ConfigError(
            f"max_jobs={max_jobs} has no effect with executor.wait=false, which starts all runs on {where} "
            "at once; use executor.wait=true, which runs them one after another, or max_jobs=null"
        )


def check_metric(metric: str, dry_run: bool, engine: Engine, train: Train) -> None:
    """Whether a run gives this metric; its name is looked up when the run is launched."""
    if dry_run:
        raise ConfigError(f"sweep_metric={metric} needs a run, and dry_run=true starts none; leave one of the two out")
    if engine.kind is EngineKind.megatron_lm:
        raise ConfigError(
            f"sweep_metric={metric} is read from metrics.jsonl, which a run with engine.kind=megatron_lm does not "
            f"write; use engine=tdpp, or leave it out"
        )
    if metric.startswith("valid/") and train.eval_interval is None:
        raise ConfigError(f"sweep_metric={metric} needs evaluations; set train.eval_interval, in iterations")


def check_cost(unpriced: Sequence[str]) -> None:
    """Whether runs can be compared by their cost, where these of their node groups have no price."""
    if unpriced:
        raise ConfigError(
            f"sweep_metric=cost needs the price of every node, and cluster.groups.{unpriced[0]}.price_per_hour is not "
            f"set; give it, in dollars per node"
        )
