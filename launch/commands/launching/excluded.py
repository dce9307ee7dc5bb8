"""`cluster.exclude=[auto]`: the hosts that `tdpp nodes` does not call healthy get no job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conf.schema.experiment import Experiment
from conf.schema.parallel import AUTO
from launch.history.hosts import Health, Host, hosts_of
from launch.history.ledger import records


def unhealthy(runs: Path) -> list[Host]:
    """The hosts that the runs in a folder show to be slow, throttled or failing."""
    return [host for host in hosts_of(records(runs)) if host.health is not Health.healthy]


def with_excluded(experiment: Experiment) -> tuple[Experiment, str | None]:
    """The experiment with the names of hosts in the place of `auto`, and in words which; None without that word."""
    given = experiment.cluster.exclude
    if AUTO not in given:
        return experiment, None
    bad = unhealthy(Path(experiment.runs_dir))
    names = [host for host in given if host != AUTO]
    names += [host.name for host in bad if host.name not in names]
    why = "; ".join(f"{host.name}, {host.health}: {host.why}" for host in bad) or "no host, for all are healthy"
    return replace(experiment, cluster=replace(experiment.cluster, exclude=names)), (
        f"cluster.exclude={AUTO} leaves out {why}"
    )
