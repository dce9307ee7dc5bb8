"""Runs on hosts that ssh reaches: on each one an agent for its node of the plan, which outlives the connection."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conf.run_folder.json_values import plain
from conf.run_folder.rundir import RunDir
from conf.schema.executor import Host
from conf.schema.experiment import ContainerKind, Experiment
from launch.control.executors.parallel_ssh import end, of_each
from launch.errors import LaunchError
from launch.machine import ssh
from launch.machine.provenance import software
from launch.node.settings import NodeSettings

CLOCK_S = 10.0
"""Clocks that differ by more make a node that lives look lost."""


def look(experiment: Experiment, run: RunDir | None = None, token: str = "") -> list[dict[str, Any]]:
    """What every host says of itself, by node rank; nothing is started.

    `run` is a folder just made that the hosts must see.

    Raises:
        LaunchError: one cannot be reached, or does not fit this machine or the others.
    """
    hosts = experiment.executor.reached
    seen = {} if run is None else {"run": str(run.path), "token": token, "runs_dir": experiment.runs_dir}
    port = experiment.executor.master_port

    def ask(host: Host) -> dict[str, Any]:
        given = {**seen, "port": port if host is hosts[0] else None, "container": str(experiment.container.kind)}
        before = time.time()
        found = ssh.call(host.name, "look", given)
        return {**found, "ahead_s": _outside(found["unix"], before, time.time())}

    found = of_each(hosts, ask)
    _check_alike(experiment, hosts, found)
    return found


def _outside(unix: float, before: float, after: float) -> float:
    """How far a host's time of day lies outside of what this machine's was before and after the question."""
    return unix - after if unix > after else min(0.0, unix - before)


def _check_alike(experiment: Experiment, hosts: Sequence[Host], found: Sequence[Mapping[str, Any]]) -> None:
    here = software()
    for host, there in zip(hosts, found, strict=True):
        if there["tdpp"] != here["tdpp"]:
            raise LaunchError(
                f"executor.hosts: {host.name} has a different version of tdpp's sources than this machine; check out "
                f"the same commit on both, or share the folder"
            )
        if _minor(there["python"]) != _minor(here["python"]):
            raise LaunchError(
                f"executor.hosts: {host.name} has Python {there['python']} at {sys.executable}, and this machine "
                f"{here['python']}; install the same version"
            )
        if abs(there["ahead_s"]) > CLOCK_S:
            raise LaunchError(
                f"executor.hosts: the clock of {host.name} is {there['ahead_s']:+.0f} s off this machine's, so signs "
                f"of life could not be judged; synchronise both (chrony, ntpd)"
            )
    if experiment.container.kind is ContainerKind.none:
        _check_torch(hosts, found)


def _check_torch(hosts: Sequence[Host], found: Sequence[Mapping[str, Any]]) -> None:
    first = found[0]["torch"]
    for host, there in zip(hosts, found, strict=True):
        if there["torch"] is None:
            raise LaunchError(
                f"executor.hosts: {host.name} has no torch in {sys.executable}; install it there, as docs/hosts.md says"
            )
        if there["torch"] != first:
            raise LaunchError(
                f"executor.hosts: {host.name} has torch {there['torch']}, and {hosts[0].name} {first}; collectives "
                f"hang between different versions, so install the same"
            )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def start(experiment: Experiment, run: RunDir, token: str, settings: Callable[[int], NodeSettings]) -> None:
    """Starts an agent on every host; jobs.json then names them. Raises LaunchError: one cannot be started. Nothing of
    the run is left on any host then that can be reached."""
    hosts = experiment.executor.reached
    jobs: list[dict[str, Any]] = [{"id": None, "nodes": [rank], "ssh": host.name} for rank, host in enumerate(hosts)]

    def write() -> None:
        run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": jobs})

    write()  # first: if this process is killed now, whoever stops the run knows where something of it may be
    look(experiment, run, token)
    names = [*experiment.cluster.environment_from, *filter(None, [experiment.notify.webhook])]
    given = {name: os.environ[name] for name in names if name in os.environ}
    agents = [plain(settings(rank)) for rank in range(len(hosts))]
    common = {"time_min": experiment.executor.time_min, "token": token, "environment": given}

    def begin(rank: int) -> None:
        name = hosts[rank].name
        jobs[rank] |= ssh.call(name, "start", {**common, "agent": agents[rank], "node": name})

    try:
        of_each(range(len(hosts)), begin)
        write()
    except BaseException:  # Ctrl-C too
        end([host.name for host in hosts], token, str(experiment.container.kind))
        raise
