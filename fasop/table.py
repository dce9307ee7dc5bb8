"""Plans as rows: for people, and for a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fasop.costs import Basis
from fasop.search import Plan

COLUMNS = ("", "tensor", "data", "pipeline", "micro", "partition", "nodes", "iteration", "samples/s", "times")
CSV_COLUMNS = (
    *("rank", "tensor", "data", "pipeline", "micro_batch_size", "global_batch_size", "partition", "node_order"),
    *("iteration_s", "pipeline_s", "sums_s", "embedding_s", "optimizer_s", "bound_s", "samples_per_s", "basis"),
)


def rows(plans: Sequence[Plan]) -> list[list[str]]:
    """In the order of `COLUMNS`."""
    return [
        [
            str(number),
            *map(str, (p.parallel.tensor, p.parallel.data, p.parallel.pipeline, p.parallel.micro_batch_size)),
            str(p.parallel.partition),
            str(p.parallel.node_order),
            f"{p.total * 1e3:.1f} ms",
            f"{p.parallel.global_batch_size / p.total:.1f}",
            str(p.basis),
        ]
        for number, p in enumerate(plans, 1)
    ]


def csv_text(plans: Sequence[Plan]) -> str:
    """A line for each plan, times in seconds; `bound_s` is proved to be below every partition of the row's plan."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for number, p in enumerate(plans, 1):
        q, parts = p.parallel, p.parts
        sizes = (q.tensor, q.data, q.pipeline, q.micro_batch_size, q.global_batch_size, q.partition, q.node_order)
        seconds = (
            p.total,
            *(float(part[0]) for part in (parts.pipeline, parts.sums, parts.embedding, parts.optimizer)),
        )
        told = (*seconds, p.bound, q.global_batch_size / p.total)
        writer.writerow((number, *sizes, *(f"{value:.6f}" for value in told), p.basis))
    return text.getvalue()


def plan_yaml(plan: Plan, command: str) -> str:
    """A file of the group `parallel`: every key, with what is predicted of it in a comment."""
    q, parts = plan.parallel, plan.parts
    seconds = {
        "pipeline": parts.pipeline[0],
        "gradients": parts.sums[0],
        "embedding": parts.embedding[0],
    }
    told = " + ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
    return "\n".join(
        [
            f"# Found by: {command}",
            f"# Predicted: {plan.total * 1e3:.1f} ms an iteration = {told}; times {plan.basis}.",
            f"tensor: {q.tensor}",
            f"data: {q.data}",
            f"pipeline: {q.pipeline}",
            f'partition: "{q.partition}"',
            f"sequence_parallel: {str(q.sequence_parallel).lower()}",
            f"recompute: {q.recompute}",
            f"sharded_optimizer: {str(q.sharded_optimizer).lower()}",
            f"micro_batch_size: {q.micro_batch_size}",
            f"global_batch_size: {q.global_batch_size}",
            f"schedule: {q.schedule}",
            f"node_order: {q.node_order}",
            "",
        ]
    )


def warnings(plans: Sequence[Plan]) -> list[str]:
    """What a reader of the table must know about its times."""
    bases = {plan.basis for plan in plans}
    told = {
        Basis.OTHER_FORMAT: "other format: measured in fp16 for bf16, or the other way round; peak rates are the same",
        Basis.EXTRAPOLATED: "extrapolated: beyond the micro-batch sizes of the profile, in proportion; an upper bound",
        Basis.NOT_MEASURED: "not measured: what the GPUs' peak rates allow; real runs take longer",
    }
    return [text for basis, text in told.items() if basis in bases]
