"""Nodes that a search counts, and that take no jobs now."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from conf.schema.experiment import Cluster
from launch.control.executors.jobs import component
from launch.control.executors.usable_nodes import shortages
from launch.errors import LaunchError
from launch.machine import slurm_commands
from launch.machine.sinfo import parse
from launch.machine.slurm_commands import SlurmSilent

TIMEOUT_S = 5
"""A search needs no Slurm."""


def nodes_now(cluster: Cluster) -> Iterator[str]:
    """A note for each group of which Slurm has fewer usable nodes than the cluster's file says."""
    if shutil.which("sinfo") is None:
        return
    try:
        rows = parse(slurm_commands.nodes(TIMEOUT_S))
    except SlurmSilent as error:
        yield f"Slurm does not answer ({str(error).rpartition(': ')[2]}), so nodes that are down are not known"
        return
    except LaunchError:  # of a site where sinfo says nothing to this user
        return
    for found in shortages([(component(name, group, ()), group.count) for name, group in cluster.groups.items()], rows):
        how = f"cluster.groups.{found.group}.count={found.usable} leaves out the others"
        yield f"{found}; the plans count {found.wanted}" + (f": {how}" if found.usable else "")
