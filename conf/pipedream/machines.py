"""Machines of a driver's file as hosts, their GPUs in the order of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from conf.pipedream.driver import Machine
from conf.pipedream.placement import Placement

CLUSTER, GROUP = "v100x2", "v100"
"""PipeDream's experiments ran on V100s; a driver's file does not say what its machines have."""


def ordered(machines: Sequence[Machine], placement: Placement) -> tuple[list[Machine], list[str]]:
    """By rank of tdpp, whose stages take ranks one behind another; and what is to be said of that."""
    wanted = [machines[rank] for ranks in placement.ranks for rank in ranks]
    used = sorted({rank for ranks in placement.ranks for rank in ranks})
    notes = []
    if left := [str(machine) for rank, machine in enumerate(machines) if rank not in used]:
        notes.append(f"left out {', '.join(left)}: no stage has a rank there")
    runs = [host for host, _ in groupby(machine.host for machine in wanted)]
    if len(runs) == len(set(runs)):
        return wanted, notes
    notes.append(
        f"its stages share hosts in turn ({', '.join(runs)}); tdpp gives ranks to the stages in order, with the same "
        f"numbers of replicas, over the hosts as listed"
    )
    return [machines[rank] for rank in used], notes


def words(machines: Sequence[Machine]) -> tuple[dict[str, object], list[str]]:
    """Executor and cluster, and what is to be said of them: this machine where all are localhost, else hosts."""
    notes = [f"its GPUs are assumed to be those of cluster={CLUSTER}; give your own cluster=… if they are not"]
    gpus = [machine.gpu for machine in machines]
    if all(machine.local for machine in machines):
        found: dict[str, object] = {
            "executor": "local",
            "cluster": CLUSTER,
            f"cluster.groups.{GROUP}.count": 1,
            f"cluster.groups.{GROUP}.gpus_per_node": len(machines),
        }
        if gpus != list(range(len(gpus))):
            found["+cluster.environment.CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        return found, notes
    by_host = [(host, [one.gpu for one in same]) for host, same in groupby(machines, lambda machine: machine.host)]
    listed = [f"{host}:gpu{'+'.join(map(str, numbers))}" for host, numbers in by_host]
    if len(by_host) > 1 and gpus == list(range(len(gpus))):
        plain = ",".join(f"{host}:{len(numbers)}" for host, numbers in by_host)
        notes.append(
            f"its GPU numbers continue from host to host as ranks do, and PipeDream's driver ignores them; they are "
            f"read as GPU numbers on each host. If they are ranks, give executor.hosts=[{plain}]"
        )
    return {"executor": "hosts", "cluster": CLUSTER, "executor.hosts": listed}, notes
