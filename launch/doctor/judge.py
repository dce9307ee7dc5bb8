"""From what was found on the nodes to what `tdpp doctor` says of it: a line for each check of each node group.

Only `Case` is looked at. Nodes that wrote nothing are named; what the others found is judged all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.run_folder.gpu_lines import GpuEntry
from conf.schema.experiment import ContainerKind, Experiment
from conf.visible import plural, size_text
from launch.doctor.devices import GIB, devices, gpu_health
from launch.doctor.findings import ALONE, Check, Fault, Level, NodeFindings, RankFindings, check
from launch.doctor.links import interfaces, links, open_ports, reached
from launch.node.missing_run_dir import Unseen

LEAST_PYTHON = (3, 8)
LEAST_TORCH = (2, 0)
CLOCK_S = 1.0
"""Clocks that differ by more can make a failure look later than what followed from it."""
SHARED_MEMORY = GIB
"""NCCL's guide asks for that much in a container (`--shm-size=1g`, chapter Troubleshooting)."""
KILLED = -9


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is known once the nodes are done."""

    experiment: Experiment
    """The experiment that is to be launched."""
    groups: tuple[str, ...]
    """The group of each node, by node rank."""
    cuda: bool
    nodes: tuple[NodeFindings, ...]
    """That have written anything, by node rank."""
    lost: Mapping[str, Mapping[str, str]]
    """Why a node wrote nothing, or not all; by group and node."""
    readings: Mapping[str, Sequence[GpuEntry]] = field(default_factory=dict)
    """What a node's GPUs said meanwhile, by node."""
    images: Mapping[str, str] = field(default_factory=dict)
    """The ID of docker's image on each node."""
    unseen: tuple[tuple[str, str, Unseen], ...] = ()
    """Group and node of those that do not see `runs_dir`."""


def judge(case: Case) -> list[Check]:
    """Returns the lines of the groups in their order, then what concerns all nodes."""
    checks: list[Check] = []
    for group in dict.fromkeys(case.groups):
        nodes = [node for node in case.nodes if node.group == group]
        checks.append(_nodes(case, group, nodes))
        checks += _runs_dir(case, group)
        if nodes:
            checks += [
                _software(group, nodes),
                *devices(case.experiment, case.cuda, group, nodes),
                *gpu_health(group, {node.name: case.readings.get(node.name, ()) for node in nodes}),
                *_shared(case, group, nodes),
            ]
    if case.nodes:
        checks += _together(case)
    return checks


def _nodes(case: Case, group: str, nodes: Sequence[NodeFindings]) -> Check:
    lost = [Fault(Level.error, node, why) for node, why in case.lost.get(group, {}).items()]
    kind = case.experiment.container.kind
    inside = "" if kind is ContainerKind.none else f", in a container of {kind}"
    return check(group, "nodes", lost, ", ".join(node.host for node in nodes) + inside)


def _runs_dir(case: Case, group: str) -> Iterator[Check]:
    """Reports only what is wrong: what a node writes is in that folder, and `disk` says how much room it has there."""
    faults = [
        Fault(Level.error, node, unseen.message(case.experiment.runs_dir))
        for of, node, unseen in case.unseen
        if of == group
    ]
    if faults:
        yield check(group, "runs_dir", faults, "")


def _software(group: str, nodes: Sequence[NodeFindings]) -> Check:
    faults = []
    for node in nodes:
        torch = next((rank.torch for rank in node.ranks if rank.torch), None)
        if not node.ranks and node.problem:
            faults.append(Fault(Level.error, node.name, node.problem))
        elif _version(node.python) < LEAST_PYTHON or (torch and _version(torch) < LEAST_TORCH):
            text = f"python {node.python} and torch {torch}; ranks need Python 3.8 and torch 2.0 or newer"
            faults.append(Fault(Level.error, node.name, text))
        elif (why := next((rank.no_engine for rank in node.ranks if rank.no_engine), None)) is not None:
            faults.append(Fault(Level.error, node.name, why))
    return check(group, "software", faults, "; ".join(dict.fromkeys(map(_versions, nodes))))


def _versions(node: NodeFindings) -> str:
    rank = next((rank for rank in node.ranks if rank.torch), None)
    torch = f", torch {rank.torch}" if rank else ""
    nccl = f", NCCL {rank.nccl}" if rank and rank.nccl else ""
    engine = f"; {rank.engine}" if rank and rank.engine else ""
    return f"python {node.python}{torch}{nccl}{engine}"


def _version(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def _shared(case: Case, group: str, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """What each node needs of file systems and of the others."""
    yield _data(case, group, nodes)
    yield from _maps(case, group, nodes)
    yield _disk(case, group, nodes)
    if len(case.groups) > 1:
        works = all(rank.all_reduce_ms is not None for node in case.nodes for rank in node.ranks)
        yield reached(group, nodes, works)
        yield from interfaces(group, nodes, works)
    yield from open_ports(case.experiment, group, nodes)


def _data(case: Case, group: str, nodes: Sequence[NodeFindings]) -> Check:
    first = case.nodes[0]
    faults = []
    for node in nodes:
        wrong: dict[str, list[str]] = {}
        for path, found in node.files.items():
            there = first.files[path]
            if found.error is not None:
                wrong.setdefault(found.error, []).append(path)
            elif there.error is None and found != there:
                wrong.setdefault(f"{found.bytes} bytes, but {there.bytes} on {first.name}", []).append(path)
        faults += [Fault(Level.error, node.name, f"{', '.join(paths)}: {why}") for why, paths in wrong.items()]
    total = sum(found.bytes or 0 for found in first.files.values())
    links = (
        ""
        if case.experiment.container.kind is ContainerKind.none
        else "; container.mounts must include the targets of links"
    )
    advice = f"data.prefix and train.load must name the same files on all nodes{links}"
    return check(group, "data", faults, f"{case.experiment.data.prefix}: {size_text(total)}, readable", advice)


def _maps(case: Case, group: str, nodes: Sequence[NodeFindings]) -> Iterator[Check]:
    """Reports only what is wrong: that index maps lie beside the data, or where data.cache says, needs no word."""
    faults = []
    for node in nodes:
        for prefix, place in node.maps.items():
            data = node.files.get(f"{prefix}.bin")
            if data is not None and data.error is not None:  # without data there are no maps
                continue
            if place.error is not None:
                faults.append(Fault(Level.error, node.name, place.error))
            elif case.experiment.data.cache is None and place.folder != Path(prefix).parent:
                text = (
                    f"{prefix} is read-only, so its index maps go to {place.folder}; to share them with other nodes "
                    f"or later containers, set data.cache=FOLDER"
                )
                faults.append(Fault(Level.warning, node.name, text))
    if faults:
        yield check(group, "index maps", faults, "")


def _disk(case: Case, group: str, nodes: Sequence[NodeFindings]) -> Check:
    train = case.experiment.train
    one = checkpoint_bytes(case.experiment)
    wanted = one * (train.keep_checkpoints + 1)  # an old one goes when the new one is there
    faults = []
    for node in nodes:
        if node.disk is not None and node.disk < wanted:
            text = (
                f"{size_text(node.disk)} free in runs_dir; a checkpoint takes {size_text(one)}, "
                f"train.keep_checkpoints={train.keep_checkpoints} and a new one take {size_text(wanted)}"
            )
            level = Level.error if node.disk < one else Level.warning
            faults.append(Fault(level, node.name, text))
        if case.cuda and node.shared_memory is not None and node.shared_memory < SHARED_MEMORY:
            text = f"{size_text(node.shared_memory)} free in /dev/shm; NCCL wants {size_text(SHARED_MEMORY)}"
            faults.append(Fault(Level.warning, node.name, text))
    free = min((node.disk for node in nodes if node.disk is not None), default=0)
    needed = f"; a checkpoint takes {size_text(one)}" if one else ""
    return check(group, "disk", faults, f"{size_text(free)} free in runs_dir{needed}")


def checkpoint_bytes(experiment: Experiment) -> int:
    """Returns the bytes of a checkpoint; 0 if none is saved."""
    train = experiment.train
    return train.checkpoint_bytes(experiment.model.parameters()) if train.checkpoint else 0


def _together(case: Case) -> Iterator[Check]:
    """What all ranks did together, as far as they came."""
    versions: dict[tuple[str | None, str | None], list[str]] = {}
    for node in case.nodes:
        for rank in node.ranks[:1]:
            versions.setdefault((rank.torch, rank.nccl), []).append(node.name)
    if len(versions) > 1:
        found = "; ".join(
            f"torch {torch}, NCCL {nccl} on {', '.join(names)}" for (torch, nccl), names in versions.items()
        )
        text = f"{found}: collectives hang between different versions; use the same image or environment on every node"
        yield Check(Level.error, "all nodes", "software", text)
    if case.images:
        yield _image(case)
    yield _all_reduce(case)
    if len(case.nodes) > 1 and all(rank.clock for node in case.nodes for rank in node.ranks[:1]):
        yield _clocks(case)
    yield from links(case.experiment, case.nodes)


def _image(case: Case) -> Check:
    """docker's image, which each node has of its own."""
    nodes: dict[str, list[str]] = {}
    for name, image in case.images.items():
        nodes.setdefault(image, []).append(name)
    text = "; ".join(f"{image} on {', '.join(names)}" for image, names in nodes.items())
    if len(nodes) == 1:
        return Check(Level.ok, "all nodes", "image", text)
    way_out = f"put the same container.image={case.experiment.container.image} on every node, and set container.digest"
    return Check(Level.error, "all nodes", "image", f"{text}: {way_out}")


def _all_reduce(case: Case) -> Check:
    ranks = [(node, rank) for node in case.nodes for rank in node.ranks]
    count = case.experiment.parallel.world_size
    times = [rank.all_reduce_ms for _, rank in ranks if rank.all_reduce_ms is not None]
    if len(times) == count:
        text = f"correct on {'all ' if count > 1 else ''}{plural(count, 'rank')}, 1 MiB in {max(times):.1f} ms"
        return Check(Level.ok, "all nodes", "all-reduce", text)
    lost = [name for nodes in case.lost.values() for name in nodes]
    why = _causes(ranks) or "not tried: " + (f"{', '.join(lost)} did not join" if lost else "not every rank joined")
    return Check(Level.error, "all nodes", "all-reduce", why)


def _causes(ranks: Sequence[tuple[NodeFindings, RankFindings]]) -> str:
    """What ended it: failures of ranks, ranks that hung, why it was not tried; only then those that lost others.

    What a rank failed at alone is reported elsewhere, and is why the others did not try.
    """
    met = [(node, rank) for node, rank in ranks if rank.stage != ALONE]
    failed = [f"rank {r.rank} ({node.name}), {r.stage}: {r.failed}" for node, r in met if r.failed and not r.symptom]
    hung = [
        f"rank {r.rank} ({node.name}) {'hung in' if r.exit_code == KILLED else 'died in'} {r.stage}"
        for node, r in met
        if not r.failed and r.exit_code not in (0, None)
    ]
    hindrances = {rank.hindrance: None for _, rank in ranks if rank.hindrance}
    lost = [f"rank {r.rank} ({node.name}), {r.stage}: {r.failed}" for node, r in met if r.failed]
    words = failed + hung or [f"not tried: {hindrance}" for hindrance in hindrances] or lost
    return "; ".join(words[:_SHOWN]) + (f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")


_SHOWN = 4


def _clocks(case: Case) -> Check:
    zero = case.nodes[0].name
    faults, offsets, known = [], [0.0], [0.0]
    for node in case.nodes:
        for rank in node.ranks[:1]:
            assert rank.clock is not None
            ahead, uncertainty = rank.clock[0] / 1e9, rank.clock[1] / 1e9
            offsets.append(abs(ahead))
            known.append(uncertainty)
            if abs(ahead) - uncertainty > CLOCK_S:
                text = f"its clock is {ahead:+.1f} s off {zero}'s; synchronise the nodes' clocks (chrony, ntpd)"
                faults.append(Fault(Level.warning, node.name, text))
    fine = f"at most {max(offsets) * 1e3:.3f} ms off {zero}'s, accurate to {max(known) * 1e6:.0f} us"
    return check("all nodes", "clocks", faults, fine)
