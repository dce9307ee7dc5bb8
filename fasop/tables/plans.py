"""Plans as rows: for people, and for a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from conf.schema.experiment import Parallel, Recompute
from fasop.search.idle import idle as idle_of
from fasop.search.idle import marked
from fasop.search.prices import Run, cost_of_step, price_per_hour, step_cost
from fasop.search.search import Plan

COLUMNS = (
    "",
    "tensor",
    "data",
    "pipeline",
    "micro",
    "partition",
    "nodes",
    "options",
    "iteration",
    "samples/s",
    "times",
)
FRONT_COLUMNS = (
    *("", "nodes", "$/hour", "iteration", "$/1000 steps", "days", "$", "tensor", "data", "pipeline", "micro"),
    *("options", "partition", "times"),
)
"""Of time against cost."""
OF_WHOLE = ("days", "$")
"""Of them those of the whole training."""
PUBLIC = (
    *("mbs", "tp", "dp", "pp", "node placement", "partition", "estimated time (step/s)", "pipeline time"),
    *("DP all-reduce time", "embedding layer all-reduce time", "price_per_step", "train_cost"),
)
"""Columns of the public FASOP's CSV files, by its names; the time is seconds a step."""
CSV_COLUMNS = (
    "rank",
    *PUBLIC,
    *("gpus", "global_batch_size", "schedule", "chunks", "recompute", "sharded_optimizer", "sequence_parallel"),
    *("optimizer_s", "bound_s", "samples_per_s", "price_per_hour", "train_days", "basis", "idle_gpus", "idle_nodes"),
)
IDLE = "idle GPUs"
"""A column that is there if a plan has such."""


def columns(plans: Sequence[Plan]) -> list[str]:
    """Those of `rows`."""
    return [*COLUMNS, *([IDLE] if any(map(marked, plans)) else [])]


def rows(plans: Sequence[Plan]) -> list[list[str]]:
    """In the order of `columns`."""
    idle = any(map(marked, plans))
    return [
        [
            str(number),
            *map(str, (p.parallel.tensor, p.parallel.data, p.parallel.pipeline, p.parallel.micro_batch_size)),
            str(p.parallel.partition),
            str(p.parallel.node_order),
            options(p.parallel),
            f"{p.total * 1e3:.1f} ms",
            f"{p.parallel.global_batch_size / p.total:.1f}",
            str(p.basis),
            *([marked(p)] if idle else []),
        ]
        for number, p in enumerate(plans, 1)
    ]


def front_columns(plans: Sequence[Plan], run: Run) -> list[str]:
    """Those of `FRONT_COLUMNS` that are known."""
    known = [column for column in FRONT_COLUMNS if run.known or column not in OF_WHOLE]
    return [*known, *([IDLE] if any(map(marked, plans)) else [])]


def front_rows(plans: Sequence[Plan], run: Run) -> list[list[str]]:
    """In the order of `front_columns`; the nodes have prices."""
    idle = any(map(marked, plans))
    return [
        [
            str(number),
            str(p.parallel.node_order),
            f"{price_per_hour(p.nodes):.2f}",
            f"{p.total * 1e3:.1f} ms",
            f"{1000 * step_cost(p):.2f}",
            *([f"{run.days(p):.3g}", f"{run.cost(p):.2f}"] if run.known else []),
            *map(str, (p.parallel.tensor, p.parallel.data, p.parallel.pipeline, p.parallel.micro_batch_size)),
            options(p.parallel),
            str(p.parallel.partition),
            str(p.basis),
            *([marked(p)] if idle else []),
        ]
        for number, p in enumerate(plans, 1)
    ]


def options(parallel: Parallel) -> str:
    """The schedule, and what is not at its default."""
    chunks = f" x{parallel.chunks}" if parallel.chunks > 1 else ""
    told = [f"{parallel.schedule}{chunks}"]
    told += [f"recompute {parallel.recompute}"] if parallel.recompute is not Recompute.none else []
    told += ["sharded optimizer"] if parallel.sharded_optimizer else []
    told += ["sequence parallel"] if parallel.sequence_parallel else []
    return ", ".join(told)


def csv_text(plans: Sequence[Plan], run: Run) -> str:
    """A line for each plan, times in seconds; `bound_s` is proved to be below every partition of the row's plan."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for number, plan in enumerate(plans, 1):
        writer.writerow([number, *map(_cell, _values(plan, run))])
    return text.getvalue()


def _values(plan: Plan, run: Run) -> Iterator[object]:
    """After the rank, in the order of `CSV_COLUMNS`."""
    p, parts = plan.parallel, plan.parts
    yield from (p.micro_batch_size, p.tensor, p.data, p.pipeline, p.node_order, p.partition, plan.total)
    yield from (float(part[0]) for part in (parts.pipeline, parts.sums, parts.embedding))
    yield from (cost_of_step(plan), run.cost(plan) if run.known else None)
    yield from (p.world_size, p.global_batch_size, p.schedule, p.chunks, p.recompute)
    yield from (p.sharded_optimizer, p.sequence_parallel, float(parts.optimizer[0]), plan.bound)
    yield from (p.global_batch_size / plan.total, price_per_hour(plan.nodes))
    yield from (run.days(plan) if run.known else None, plan.basis)
    found = idle_of(plan)
    yield from (found.gpus, found.where)


def _cell(value: object) -> str:
    """Nothing where a price, or the length of the training, is not known."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.6f}"
        case _:
            return str(value)


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
            "# Found by: " + command.replace("\n", "\n# "),
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
            f"chunks: {q.chunks}",
            f'node_order: "{q.node_order}"',
            "",
        ]
    )
