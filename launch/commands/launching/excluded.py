"""`cluster.exclude=[auto]`: the hosts that `tdpp nodes` does not call healthy get no job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conf.schema.cluster import Cluster
from conf.schema.executor import ExecutorKind
from conf.schema.values.partition import AUTO
from conf.schema.values.sbatch import names_nodes
from launch.errors import LaunchError
from launch.history.hosts import Health, Host, hosts_of
from launch.history.ledger import announcement, records
from launch.machine import sinfo, slurm_commands

Known = dict[tuple[ExecutorKind, Path], "tuple[list[Host], frozenset[str] | None]"]
"""The hosts that are not healthy and the nodes of Slurm, by executor and folder of runs: all combinations of a sweep
leave out the same."""


def with_excluded(
    cluster: Cluster, executor: ExecutorKind, runs: Path, known: Known | None = None
) -> tuple[Cluster, str | None]:
    """Put the names of hosts in the place of `auto`, and say which; None without that word. `runs` is the folder of the
    runs that show what hosts are like; `known` holds what was found before."""
    given = cluster.exclude
    if AUTO not in given:
        return cluster, None
    known = {} if known is None else known
    key = executor, runs.absolute()
    if key not in known:
        hosts = hosts_of(records(runs, announcement(runs)))
        known[key] = [host for host in hosts if host.health is not Health.healthy], _nodes(executor)
    bad, nodes = known[key]
    found = {name: host for host in bad if (name := _node_of(host.name, nodes)) is not None}
    others = [host.name for host in bad if host not in found.values()]
    names = list(dict.fromkeys([*(host for host in given if host != AUTO), *found]))
    why = "; ".join(f"{name}, {host.health}: {host.why}" for name, host in found.items()) or "no host"
    if others:
        why += f"; not healthy, but no node of Slurm: {', '.join(others)}"
    elif not found:
        why += ", for all are healthy"
    return replace(cluster, exclude=names), f"cluster.exclude={AUTO} leaves out {why}"


def _nodes(executor: ExecutorKind) -> frozenset[str] | None:
    """The nodes that Slurm has; None without Slurm, or where it does not answer, as for a dry run elsewhere."""
    if executor is not ExecutorKind.slurm:
        return None
    try:
        return frozenset(row.node for row in sinfo.parse(slurm_commands.nodes()))
    except LaunchError:
        return None


def _node_of(host: str, nodes: frozenset[str] | None) -> str | None:
    """What a host is called as a node; None if it is none: runs on a login node are records, too, and Slurm refuses a
    job that excludes what it does not know."""
    names = [name for name in (host, host.partition(".")[0]) if names_nodes(name)]
    return next((name for name in names if nodes is None or name in nodes), None)
