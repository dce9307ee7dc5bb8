"""Finding out what machines there are: Slurm's answer, a short job on a node of each group, ssh, or this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from conf.errors import RunFolderError
from conf.run_folder.json_values import typed
from conf.schema.executor import hosts
from conf.visible import plural, span
from launch.errors import LaunchError
from launch.init import gpu_kinds, slurm_nodes
from launch.init.machines import CPU_GBIT_PER_S, Found, FoundGroup
from launch.init.slurm_nodes import Group
from launch.machine import slurm_commands, ssh
from launch.machine.node_figures import MODULE, NodeFigures, node_figures
from launch.machine.slurm_commands import JobRefused
from launch.screen import some

MOST_NAMES = 4
"""How many nodes a note names."""
RUN_MIN = 2
"""A node answers in seconds."""


def on_slurm(wait_s: int, charged: Mapping[str, str]) -> Found:
    """The nodes that sinfo shows. One of each group is asked what it has, if it is free within `wait_s`; `charged` are
    `account` and `qos` of all jobs, where they are given. Raises LaunchError: Slurm does not answer, or has no node for
    the user's jobs."""
    groups = slurm_nodes.groups(slurm_nodes.parse(slurm_commands.nodes()))
    there = [group for group in groups if group.nodes]
    gone = [f"{group.name}: {_why_not(group)}" for group in groups if not group.nodes]
    if not there:
        raise LaunchError(
            f"sinfo shows no node that takes jobs: {'; '.join(gone) or 'no node at all'}; try again later"
        )
    names = ", ".join(group.name for group in there)
    print(f"querying one node each of {names}, for up to {span(wait_s)} …", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(max_workers=len(there)) as pool:
        answers = list(pool.map(lambda group: _answer(group, wait_s, charged), there))
    account, qos = charged.get("account"), charged.get("qos")
    found, refused = [], []
    for group, answer in zip(there, answers, strict=True):
        if isinstance(answer, JobRefused):
            refused.append(f"{group.name}: Slurm refuses your jobs in partition {group.partition}: {answer}")
        else:
            found.append(replace(of_slurm(group, answer), account=account, qos=qos))
    if not found:
        raise LaunchError(
            f"{'; '.join(refused)}; ask your administrator for a partition, an account or a quality of service that "
            f"you may use, and name the latter with --account and --qos"
        )
    return Found(groups=tuple(found), executor="slurm", source="Slurm and its nodes say", notes=(*gone, *refused))


def _why_not(group: Group) -> str:
    """Why no job starts on a group's nodes."""
    if group.availability != "up":
        return f"partition {group.partition} is {group.availability}, so no job starts there"
    if len(group.unusable) == 1:
        return f"its only node, {group.unusable[0]}, is down, drained or reserved"
    return f"all {len(group.unusable)} nodes are down, drained or reserved"


def _answer(group: Group, wait_s: int, charged: Mapping[str, str]) -> NodeFigures | JobRefused | str:
    """What a node of the group says of itself, or why none did."""
    options = [*group.options, *(f"--{key}={value}" for key, value in charged.items())]
    try:
        printed = slurm_commands.on_one_node(options, [sys.executable, "-m", MODULE], wait_s, RUN_MIN)
        return NodeFigures.parse(printed)
    except JobRefused as refusal:
        return refusal
    except (LaunchError, RunFolderError, ValueError) as error:
        return str(error)


def of_slurm(group: Group, answer: NodeFigures | str) -> FoundGroup:
    """A group as it is written, by what Slurm and one of its nodes say. Without an answer Slurm's word counts."""
    notes = []
    if isinstance(answer, str):
        notes.append(f"no node answered: {' '.join(answer.split())}")
        kind = gpu_kinds.of_type(group.gres.type) if group.gres else gpu_kinds.ON_CPU
        within, network = gpu_kinds.PCIE_GBIT_PER_S, None
    else:
        kind = gpu_kinds.of_figures(answer.gpus, group.gres.type) if group.gres and answer.gpus else gpu_kinds.ON_CPU
        if group.gres and answer.gpus and group.gres.is_part:
            kind = gpu_kinds.of_type(group.gres.type)
        within, network = gpu_kinds.within_gbit_per_s(answer.gpus), answer.network_gbit_per_s
        if group.gres and not answer.gpus:
            notes.append(f"Slurm lists {group.gres} here, but ranks will run on the CPU: {answer.no_gpus}")
    on_cpu = kind is gpu_kinds.ON_CPU
    if group.unusable:
        notes.append(f"down, drained or reserved, so not counted: {', '.join(group.unusable)}")
    if group.others:
        notes.append(f"these nodes are also in partition {', '.join(group.others)}")
    if group.strangers:
        few = some(group.strangers, MOST_NAMES)
        notes.append(f"Slurm may start jobs of this group on other nodes of the partition, too: {few}")
    if group.other_gres:
        notes.append(f"its nodes also have {', '.join(map(str, group.other_gres))}, which the group does not use")
    ranks = 1 if on_cpu or group.gres is None else group.gres.count
    return FoundGroup(
        name=group.name,
        count=len(group.nodes),
        ranks=ranks,
        gpu=kind,
        partition=group.partition,
        gres=None if group.gres is None else str(group.gres),
        gres_type=None if group.gres is None else group.gres.type,
        of_parts=group.gres is not None and group.gres.is_part,
        constraint=group.constraint,
        cpus=ranks if on_cpu else group.cpus,
        time_limit=group.time_limit,
        within_gbit_per_s=CPU_GBIT_PER_S if on_cpu else within,
        network_gbit_per_s=network,
        notes=tuple(notes),
    )


def on_hosts(texts: Sequence[str]) -> Found:
    """The hosts as `executor.hosts` takes them, each of which ssh reaches.

    Raises:
        ConfigError: one is written in another way.
        LaunchError: one cannot be reached.
    """
    reached = hosts(texts, "--hosts")
    with ThreadPoolExecutor(max_workers=len(reached)) as pool:
        answers = [*pool.map(lambda host: typed(NodeFigures, ssh.call(host.name, "figures", {}), host.name), reached)]
    on_gpus = all(len(answer.gpus) >= host.ranks for host, answer in zip(reached, answers, strict=True))
    groups: dict[str, FoundGroup] = {}
    order = []
    for host, answer in zip(reached, answers, strict=True):
        kind = gpu_kinds.of_figures(answer.gpus) if on_gpus else gpu_kinds.ON_CPU
        before = groups.get(kind.key)
        order.append(kind.key)
        groups[kind.key] = FoundGroup(
            name=kind.key,
            count=1 + (before.count if before else 0),
            ranks=max(host.ranks, before.ranks or 0 if before else 0),
            gpu=kind,
            within_gbit_per_s=gpu_kinds.within_gbit_per_s(answer.gpus) if on_gpus else CPU_GBIT_PER_S,
            network_gbit_per_s=answer.network_gbit_per_s,
        )
    lacking = [
        f"{host.name} has {plural(len(answer.gpus), 'GPU')} for {plural(host.ranks, 'rank')}, so all ranks run on CPUs"
        for host, answer in zip(reached, answers, strict=True)
        if any(answer.gpus for answer in answers) and len(answer.gpus) < host.ranks
    ]
    return Found(
        groups=tuple(groups.values()),
        executor="hosts",
        hosts=tuple(texts),
        order=tuple(order),
        source="the hosts say",
        notes=tuple(lacking),
    )


def here() -> Found:
    """This machine alone."""
    figures = node_figures()
    if not figures.gpus:
        group = FoundGroup(name="local", count=1, ranks=None, gpu=gpu_kinds.ON_CPU)
    else:
        kind = gpu_kinds.of_figures(figures.gpus)
        within = gpu_kinds.within_gbit_per_s(figures.gpus)
        group = FoundGroup(name="local", count=1, ranks=len(figures.gpus), gpu=kind, within_gbit_per_s=within)
    return Found(groups=(group,), executor="local", source="this machine says")
