"""What is known of the machines, with the prices and the network that only a person or an option can say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from conf.visible import plural
from launch.errors import LaunchError
from launch.init.gpu_kinds import CPU, GpuKind

ASSUMED_GBIT_PER_S = 10.0
"""Between nodes, where nobody says more: an ordinary network card."""
NODE_LATENCY_US, GPU_LATENCY_US, CPU_LATENCY_US, TCP_LATENCY_US = 20.0, 10.0, 200.0, 50.0
"""Assumptions, as those of the shipped clusters."""
CPU_GBIT_PER_S = 8.0


@dataclass(frozen=True, kw_only=True)
class FoundGroup:
    """A group of the cluster that is to be written."""

    name: str
    count: int
    ranks: int | None
    """The ranks of a node; None: as many as the plan asks for, on this machine alone."""
    gpu: GpuKind
    partition: str | None = None
    gres: str | None = None
    gres_type: str | None = None
    of_parts: bool = False
    """Whether its GPUs are parts of GPUs (MIG)."""
    constraint: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus: int | None = None
    """For a node's ranks, as Slurm is asked for them."""
    time_limit: str | None = None
    within_gbit_per_s: float = CPU_GBIT_PER_S
    network_gbit_per_s: float | None = None
    """What the nodes say."""
    price_per_hour: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def on_cpu(self) -> bool:
        return self.gpu.key == CPU

    @property
    def title(self) -> str:
        """Describes it in a line for people."""
        nodes = plural(self.count, "node")
        if self.on_cpu:
            return f"{nodes}, CPU"
        return f"{nodes} of {self.ranks} x {self.gpu.name}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """All machines together."""

    groups: tuple[FoundGroup, ...]
    executor: str
    """A choice of the group `executor`."""
    hosts: tuple[str, ...] = ()
    """With executor=hosts, as `executor.hosts` takes them."""
    order: tuple[str, ...] = ()
    """With executor=hosts, the group of each."""
    source: str
    """Who said so, for the head of the file."""
    notes: tuple[str, ...] = field(default=())
    """What was left out, or could not be found out."""


def usable(found: Found) -> Found:
    """Without what cannot train with the rest: nodes without GPUs where others have some, and parts of GPUs beside
    whole ones."""
    if found.executor == "hosts":
        return found
    left = without(found, lambda group: group.on_cpu, "ranks on CPUs cannot train together with ranks on GPUs")
    return without(left, lambda group: group.of_parts, "NCCL does not connect several parts of one GPU (MIG)")


def without(found: Found, excluded: Callable[[FoundGroup], bool], why: str) -> Found:
    """Leaves out some groups, unless there are no others; a note says why."""
    kept = tuple(group for group in found.groups if not excluded(group))
    if not kept:
        return found
    left_out = [
        f"{group.name} ({group.title}) is left out: {why}" + "".join(f"; {note}" for note in group.notes)
        for group in found.groups
        if excluded(group)
    ]
    return replace(found, groups=kept, notes=(*found.notes, *left_out))


Asked = Callable[[str], str]
"""A question's answer."""


def priced(found: Found, given: Mapping[str, float]) -> Found:
    """Returns the machines with the prices of `--price`, by group, kind of GPU or Slurm's type of it. Raises
    LaunchError: a name is none of these."""
    unknown = [name for name in given if not any(name in _names(group) for group in found.groups)]
    if unknown:
        known = ", ".join(dict.fromkeys(name for group in found.groups for name in _names(group)))
        raise LaunchError(
            f"--price {unknown[0]}={given[unknown[0]]:g}: no group or GPU type {unknown[0]}; the known ones are {known}"
        )

    def of(group: FoundGroup) -> FoundGroup:
        prices = [given[name] for name in _names(group) if name in given]
        return replace(group, price_per_hour=prices[0]) if prices else group

    return replace(found, groups=tuple(map(of, found.groups)))


def with_network(found: Found, gbit_per_s: float) -> Found:
    """Returns the machines with the figure of `--network`, between all nodes."""
    return replace(found, groups=tuple(replace(group, network_gbit_per_s=gbit_per_s) for group in found.groups))


def answered(found: Found, ask: Asked) -> Found:
    """Returns the machines with what the person at the terminal says; nothing is as good as Enter."""
    if found.executor == "local":
        return found
    groups = []
    for group in found.groups:
        price = group.price_per_hour
        if price is None:
            price = _number(ask, f"{group.name}: US dollars an hour of one node ({group.title}) [leave out]: ")
        groups.append(replace(group, price_per_hour=price))
    found = replace(found, groups=tuple(groups))
    if any(group.network_gbit_per_s is None for group in groups):
        rate = _number(ask, f"network between nodes, Gbit/s [{ASSUMED_GBIT_PER_S:g}]: ")
        found = found if rate is None else with_network(found, rate)
    return found


def at_the_terminal(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _number(ask: Asked, question: str) -> float | None:
    while answer := ask(question).strip():
        try:
            if 0 < (value := float(answer)) < float("inf"):
                return value
        except ValueError:
            pass
        print(f"{answer!r} is not a number above 0; Enter keeps the default", file=sys.stderr)
    return None


def _names(group: FoundGroup) -> Sequence[str]:
    return [name for name in (group.name, group.gpu.key, group.gres_type) if name is not None]
