"""A division as rows: for people, and for a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fasop.graphs.division import Stage, StageDivision, Sync


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
