"""Which module is on which stage, and which ranks take a stage: PipeDream's dp_conf.json, mp_conf.json and
hybrid_conf.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from conf.pipedream.driver import Keys, Machine, content_of

MODULES, RANKS, DEPTHS = "module_to_stage_map", "stage_to_rank_map", "stage_to_depth_map"
BLOCKS = "tdpp_partition"
"""Written by tdpp alone; PipeDream's programs do not look at it."""


@dataclass(frozen=True)
class Placement:
    """Stages and ranks of a model."""

    modules: tuple[int, ...]
    """The stage of each module, the last of which is the loss."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each stage."""
    depth: tuple[int, ...] | None = None
    """Each stage's forward passes before the first backward pass; None: as many as keep all ranks busy."""
    partition: tuple[int, ...] | None = None
    """Blocks of tdpp's model by stage, where tdpp wrote the file."""

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranks))

    def text(self) -> str:
        """The file."""
        content: dict[str, Any] = {MODULES: list(self.modules), RANKS: _by_stage(map(list, self.ranks))}
        if self.depth is not None:
            content[DEPTHS] = _by_stage(self.depth)
        if self.partition is not None:
            content[BLOCKS] = list(self.partition)
        lines = (f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"


def placed(
    modules: Sequence[int],
    replicas: Sequence[int],
    depth: Sequence[int] | None = None,
    partition: Sequence[int] | None = None,
) -> Placement:
    """On ranks one behind another."""
    ranks: list[tuple[int, ...]] = []
    for count in replicas:
        first = sum(map(len, ranks))
        ranks.append(tuple(range(first, first + count)))
    return Placement(tuple(modules), tuple(ranks), _tuple(depth), _tuple(partition))


def read(path: Path, said: str) -> Placement:
    """Raises ConfigError, beginning with `said`, for a file that cannot be read or says nothing that can be run."""
    content = content_of(path, f"{said} {path}")
    keys = Keys(content)
    modules = content.pop(MODULES, None)
    numbers = isinstance(modules, list) and all(type(stage) is int for stage in modules) and len(modules) > 1
    stages = sorted(set(modules)) if numbers else [0]
    if not numbers:
        keys.refused.append(f"{MODULES}={modules}: it must list the stage of each module and of the loss")
    elif stages != list(range(len(stages))) or modules != sorted(modules):
        keys.refused.append(f"{MODULES}={modules}: stages must be 0, 1, … in the order of the modules")
    ranks = _of_stages(keys, RANKS, stages)
    if ranks is not None:
        found = [rank for one in ranks if isinstance(one, list) for rank in one]
        if any(not isinstance(one, list) or not one for one in ranks) or any(type(rank) is not int for rank in found):
            keys.refused.append(f"{RANKS}: each stage must have a list of ranks, such as {{'0': [0, 1], '1': [2]}}")
        elif sorted(found) != list(range(len(found))):
            keys.refused.append(f"{RANKS}: ranks {found}: each rank from 0 to {len(found) - 1} must occur once")
    depth = _of_stages(keys, DEPTHS, stages) if content.get(DEPTHS) is not None else None
    if depth is not None and any(type(one) is not int or one < 0 for one in depth):
        keys.refused.append(f"{DEPTHS}: each stage must have a whole number, at least 0")
    partition = content.get(BLOCKS)
    if partition is not None and not (
        isinstance(partition, list)
        and len(partition) == len(stages)
        and all(type(one) is int and one >= 0 for one in partition)
    ):
        keys.refused.append(f"{BLOCKS}={partition}: it must list the blocks of each stage")
    keys.check(f"{said} {path}")
    assert ranks is not None
    return Placement(tuple(modules), tuple(map(tuple, ranks)), _tuple(depth), _tuple(partition))


def _of_stages(keys: Keys, key: str, stages: Sequence[int]) -> list[Any] | None:
    """The values of a mapping, by stage."""
    value = keys.left.pop(key, None)
    by_name = {str(name): one for name, one in value.items()} if isinstance(value, dict) else {}
    if sorted(by_name) != sorted(map(str, stages)):
        keys.refused.append(
            f"{key}={value}: it must have stages {', '.join(map(str, stages))}, as in {MODULES}, and no others"
        )
        return None
    return [by_name[str(stage)] for stage in stages]


def _tuple(numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


def _by_stage(values: Any) -> dict[str, Any]:
    return {str(stage): value for stage, value in enumerate(values)}


CLUSTER, GROUP = "v100x2", "v100"
"""PipeDream's experiments ran on V100s; a driver's file does not say what its machines have."""


def ordered(machines: Sequence[Machine], placement: Placement) -> tuple[list[Machine], list[str]]:
    """Machines by rank of tdpp, whose stages take ranks one behind another; and what is to be said of that."""
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
