"""The GPUs that torch sees on the nodes against those of the plan; their CPUs, where no GPUs are planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from conf.run_folder.gpu_lines import WAYS_OUT, GpuEntry, GpuTrouble
from conf.schema.experiment import ExecutorKind, Experiment
from conf.visible import plural
from launch.doctor.findings import ALONE, Check, Fault, Level, NodeFindings, RankFindings, check

GIB = 2**30
MEMORY_SHARE = 0.95
"""The share that a GPU must have of its configured memory; the rest may be the driver's."""
FREE_SHARE = 0.9
"""The share of a GPU's memory that must be free; with less somebody else computes on it."""


def devices(experiment: Experiment, cuda: bool, group: str, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """The GPUs of a group's nodes, or, where none are planned, their CPUs; nothing where no rank lived to see GPUs."""
    if not cuda:
        way_out = (
            "request more with cluster.groups.{group}.cpus_per_task={wanted}"
            if experiment.executor.kind is ExecutorKind.slurm
            else "ranks that share a CPU wait for each other, so times vary and predictions do not hold; use at most "
            "as many ranks as CPUs"
        )
        faults = [
            Fault(
                Level.warning,
                node.name,
                f"{plural(node.cpus, 'CPU')} for {plural(node.wanted, 'rank')}: "
                + way_out.format(group=group, wanted=node.wanted),
            )
            for node in nodes
            if node.cpus < node.wanted
        ]
        counts = sorted({node.cpus for node in nodes})
        yield check(group, "CPUs", faults, f"{' or '.join(map(str, counts))} for {plural(nodes[0].wanted, 'rank')}")
        return
    if not any(node.ranks for node in nodes):
        return
    named = dict.fromkeys(name for node in nodes for rank in node.ranks[:1] for name in rank.gpus)
    fine = f"{nodes[0].wanted} x {', '.join(named)} on each node, free"
    yield check(group, "GPUs", [fault for node in nodes for fault in _gpu_faults(experiment, group, node)], fine)


def _gpu_faults(experiment: Experiment, group: str, node: NodeFindings) -> Iterator[Fault]:
    config = experiment.cluster.groups[group]
    gpu = experiment.cluster.gpus[config.gpu]
    first = next((rank for rank in node.ranks if rank.torch), None)
    if first is None:
        if node.ranks and node.problem:
            yield Fault(Level.error, node.name, node.problem)
        return
    if len(first.gpus) < node.wanted:
        why = first.failed if first.failed and not first.gpus else f"torch sees {len(first.gpus)}"
        text = (
            f"{why}, but the plan needs {node.wanted} x {gpu.name} (cluster.groups.{group}.gpus_per_node); make sure "
            f"that gres ({config.gres}) gives them to the job, or plan with the GPUs that are there"
        )
        yield Fault(Level.error, node.name, text)
        return
    for rank in node.ranks:
        if rank.failed and rank.stage == ALONE:
            yield Fault(Level.error, node.name, f"rank {rank.rank}: {rank.failed}")
    others = {name for name in first.gpus if not gpu.is_called(name)}
    if others:
        text = f"found {', '.join(sorted(others))}, but cluster.groups.{group}.gpu={config.gpu} is {gpu.name}"
        yield Fault(Level.warning, node.name, text)
    for rank in node.ranks:
        if rank.memory is not None:
            yield from _memory_faults(node, rank, rank.memory, config.gpu, gpu.memory_gib)


def _memory_faults(
    node: NodeFindings, rank: RankFindings, memory: tuple[int, int], key: str, wanted_gib: float
) -> Iterator[Fault]:
    free, total = memory[0] / GIB, memory[1] / GIB
    if total < MEMORY_SHARE * wanted_gib:
        text = f"its GPU has {total:.1f} GiB, but cluster.gpus.{key}.memory_gib={wanted_gib:g}"
        yield Fault(Level.warning, node.name, text)
    if free < FREE_SHARE * total:
        text = f"the GPU of rank {rank.rank} has only {free:.1f} of {total:.1f} GiB free: another process uses it"
        yield Fault(Level.warning, node.name, text)


def gpu_health(group: str, readings: Mapping[str, Sequence[GpuEntry]]) -> Iterator[Check]:
    """What the drivers of a group's nodes said while the ranks were on the GPUs; nothing where none was asked."""
    if any(readings.values()):
        faults = [fault for node, entries in readings.items() for fault in _driver_faults(node, entries)]
        yield check(group, "GPU driver", faults, "no GPU has a fault or lower clocks from heat or its power supply")


def _driver_faults(node: str, entries: Sequence[GpuEntry]) -> Iterator[Fault]:
    held: dict[int, dict[str, None]] = {}
    for entry in entries:
        if isinstance(entry, GpuTrouble):
            yield Fault(Level.warning, node, entry.text)
            continue
        for gpu in entry.gpus:
            held.setdefault(gpu.index, {}).update(dict.fromkeys(gpu.throttled))
    for index, reasons in held.items():
        if reasons:
            text = f"GPU {index} lowers its clocks: {', '.join(reasons)}; {WAYS_OUT[next(iter(reasons))]}"
            yield Fault(Level.warning, node, text)
