"""What is known of the machines, as the files are written from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from conf.visible import plural
from launch.first_day.gpu_kinds import CPU, GpuKind

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
    """Of a node; None: as many as the plan asks for, on this machine alone."""
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
        """In a line for people."""
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
    """Without some groups, unless there are no others; a note says why."""
    kept = tuple(group for group in found.groups if not excluded(group))
    if not kept:
        return found
    left_out = [
        f"{group.name} ({group.title}) is left out: {why}" + "".join(f"; {note}" for note in group.notes)
        for group in found.groups
        if excluded(group)
    ]
    return replace(found, groups=kept, notes=(*found.notes, *left_out))
