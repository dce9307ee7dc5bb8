"""A graph divided into stages: what a search is asked for, what it answers, and that as rows for people and files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fasop.costs.arrays import Floats
from fasop.graphs.graph import Graph, Operator, Operators


@dataclass(frozen=True, kw_only=True)
class Level:
    machines: int
    bytes_per_s: float


class Sync(StrEnum):
    """What a stage with replicas takes for a mini-batch."""

    sum = "sum"
    """First its operators, then the sum of its gradients."""
    max = "max"
    """The longer of the two: gradients are summed while the next mini-batches are computed."""

    def together(self, compute_s: Floats | float, summing_s: Floats | float) -> Floats:
        return np.add(compute_s, summing_s) if self is Sync.sum else np.maximum(compute_s, summing_s)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The public optimizer's flags, and how gradients are summed."""

    memory_bytes: float | None = None
    """Memory of each machine; None: it does not limit."""
    straight: bool = False
    """No replicas."""
    fewer: bool = False
    """Fewer machines where more are no faster."""
    compression: float | None = None
    """What activations are divided by before they are sent; None: sending them takes no time."""
    sync: Sync = Sync.sum


@dataclass(frozen=True, kw_only=True)
class Takes:
    """Seconds of each mini-batch of the pipeline, in the steady state, all replicas of the stage together."""

    compute_s: float
    """On the slowest GPU."""
    summing_s: float
    """Seconds of summing the gradients."""
    received_s: float
    """Seconds of the busiest link that what enters the stage crosses, there and its gradients back."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    nodes: tuple[Operator, ...]
    """Each after its inputs."""
    replicas: tuple[int, ...]
    """Replicas on each level of the network, the outermost first; a stage on contiguous ranks has one number."""
    versions: int | None = None
    """Versions of the weights that are alive at once, at most; None: not known."""
    memory_bytes: float | None = None
    """Memory that a rank needs."""
    takes: Takes | None = None
    """None: not known, as of nested stages."""

    @property
    def compute_s(self) -> float:
        """Add up the seconds of a mini-batch on one machine."""
        return sum(node.compute_ms for node in self.nodes) / 1e3

    @property
    def parameter_bytes(self) -> float:
        return sum(node.parameter_bytes for node in self.nodes)

    @property
    def activation_bytes(self) -> float:
        """From the forward to the backward pass of a mini-batch."""
        return sum(node.held_bytes for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class StageDivision:
    stages: tuple[Stage, ...]
    graph: Graph
    """With stages, as the public optimizer writes it."""
    pipeline_s: float
    """Seconds of a mini-batch in the steady state: those of the slowest stage or link."""
    sync: Sync = Sync.sum
    """How stages are counted whose gradients are summed."""
    data_parallel_s: float
    single_s: float
    """On one machine."""
    node_order: str | None = None
    """A node order that `parallel.node_order` takes; None: the machines are no cluster."""
    notes: tuple[str, ...] = ()
    """In words, what is proved of it, and what else a reader must know."""

    @property
    def replicas(self) -> str:
        """Write the replicas of each stage, such as 15-1; by level and stage such as 2x3-2x1."""
        return "-".join("x".join(map(str, stage.replicas)) for stage in self.stages)


def stages_of(
    operators: Operators, placed: Sequence[int | None], replicas: Sequence[tuple[int, ...]]
) -> tuple[Stage, ...]:
    """Make the stages from the number of each operator's stage."""
    return tuple(
        Stage(
            nodes=tuple(node for node, where in zip(operators.nodes, placed, strict=True) if where == stage),
            replicas=several,
        )
        for stage, several in enumerate(replicas)
    )


def table(division: StageDivision) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """A row for each stage."""
    rows = [
        {
            "stage": str(number),
            "replicas": "x".join(map(str, stage.replicas)),
            "operators": _span(stage),
            "alone": f"{stage.compute_s * 1e3:.1f} ms",
            "parameters": f"{stage.parameter_bytes / 1e6:.1f} MB",
            "activations": f"{stage.activation_bytes / 1e6:.1f} MB",
            **({} if stage.versions is None else {"versions": str(stage.versions)}),
            **({} if stage.memory_bytes is None else {"memory": f"{stage.memory_bytes / 1e9:.2f} GB"}),
        }
        for number, stage in enumerate(division.stages)
    ]
    return [*rows[0]], [[*row.values()] for row in rows]


def _span(stage: Stage) -> str:
    names = [node.name for node in stage.nodes if not node.is_part]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})" if names else "none"


def summary(division: StageDivision) -> str:
    """One line."""
    pipeline, data_parallel, single = division.pipeline_s, division.data_parallel_s, division.single_s
    return (
        f"replicas {division.replicas}: {pipeline * 1e3:.3f} ms per mini-batch, {1 / pipeline:.2f} per second; "
        f"{data_parallel / pipeline:.2f} times as fast as data parallelism ({data_parallel * 1e3:.3f} ms), "
        f"{single / pipeline:.2f} times as fast as one machine ({single * 1e3:.3f} ms)"
    )


def takes(division: StageDivision) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """A row for each stage: what it takes of a mini-batch, in ms; none where that is not known."""
    head = ("stage", "replicas", "compute", "all-reduce", "both", "in", "out")
    stages, rows = division.stages, []
    for number, stage in enumerate(stages):
        if stage.takes is None:
            return head, []
        behind = stages[number + 1].takes if number + 1 < len(stages) else None
        known = stage.takes
        both = division.sync.together(known.compute_s, known.summing_s)
        seconds = (known.compute_s, known.summing_s, both, known.received_s, behind.received_s if behind else 0.0)
        rows.append([str(number), division.replicas.split("-")[number], *(f"{one * 1e3:.3f}" for one in seconds)])
    return head, rows


def bound(division: StageDivision) -> str:
    """In words, what no other division would have to make faster; empty where it is not known."""
    found: list[tuple[float, str]] = []
    for number, stage in enumerate(division.stages):
        if stage.takes is None:
            return ""
        compute, summing = stage.takes.compute_s, stage.takes.summing_s
        seconds = float(division.sync.together(compute, summing))
        and_ = "beside" if division.sync is Sync.max else "and"
        parts = f"{compute * 1e3:.3f} ms of compute {and_} {summing * 1e3:.3f} ms of gradient all-reduce"
        found.append((seconds, f"Stage {number} bounds the pipeline: each mini-batch takes {parts}."))
        sending = (
            f"The messages between stage {number - 1} and stage {number} bound the pipeline: each mini-batch takes "
            f"{stage.takes.received_s * 1e3:.3f} ms of the busiest link."
        )
        found.append((stage.takes.received_s, sending))
    return max(found, key=lambda one: one[0])[1]


def csv_text(division: StageDivision) -> str:
    """A row for each stage; times in seconds, sizes in bytes."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [
            *("stage", "replicas", "operators", "compute_s", "parameter_bytes", "activation_bytes", "versions"),
            *("memory_bytes", "pipeline_s", "data_parallel_s", "single_s"),
            *("stage_compute_s", "stage_summing_s", "stage_received_s"),
        ]
    )
    for number, stage in enumerate(division.stages):
        writer.writerow(
            [
                *(number, "x".join(map(str, stage.replicas)), ";".join(node.name for node in stage.nodes)),
                *(stage.compute_s, stage.parameter_bytes, stage.activation_bytes, stage.versions, stage.memory_bytes),
                *(division.pipeline_s, division.data_parallel_s, division.single_s),
                *((None,) * 3 if (own := stage.takes) is None else (own.compute_s, own.summing_s, own.received_s)),
            ]
        )
    return file.getvalue()
