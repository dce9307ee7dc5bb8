"""Plans as rows: for people, and for a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from conf.compose import compose_unchecked
from conf.reading.words import with_values
from conf.schema.parallel import Parallel
from fasop.search.findings.idle_gpus import idle, marked
from fasop.search.front import COST, ENERGY, Expense
from fasop.search.plan import Plan, Run, price_per_hour
from fasop.search.space.choices import split
from megatron_ext.contract.parallel_config import SCATTERS, Compress, Offload, Recompute, ReduceDtype, Shards

if TYPE_CHECKING:
    from fasop.tables.explain import Table


def ranking(plans: Sequence[Plan]) -> Table:
    """A row for each plan, the best first; GPUs that compute nothing have a column if one of the plans has such."""
    idle_gpus = [*map(marked, plans)]
    return _table(
        [
            {
                "": str(number),
                **_sizes(p),
                "partition": str(p.parallel.partition),
                "nodes": str(p.parallel.node_order),
                "options": options(p.parallel),
                "iteration": f"{p.total * 1e3:.1f} ms",
                "samples/s": f"{p.parallel.global_batch_size / p.total:.1f}",
                "times": str(p.basis),
                **({"idle GPUs": mark} if any(idle_gpus) else {}),
            }
            for number, (p, mark) in enumerate(zip(plans, idle_gpus, strict=True), 1)
        ]
    )


def front(plans: Sequence[Plan], run: Run, expense: Expense = COST) -> Table:
    """Time against an expense that is known of all nodes. Both of the whole training where its length is known."""
    idle_gpus, traffic = [*map(marked, plans)], [*map(expense.of_traffic, plans)]
    return _table(
        [
            {
                "": str(number),
                "nodes": str(p.parallel.node_order),
                expense.rate: f"{expense.per_hour(p.nodes):.2f}",
                "iteration": f"{p.total * 1e3:.1f} ms",
                **({} if (lost := run.lost(p)) is None else {"lost": f"{lost:.1%}"}),
                f"{expense.unit}/1000 steps": f"{1000 * expense.known(p, run):.2f}",
                **({"of it traffic": f"{1000 * traffic[number - 1]:.2f}"} if any(traffic) else {}),
                **(
                    {"days": f"{run.days(p):.3g}", expense.unit: f"{run.iterations * expense.known(p, run):.2f}"}
                    if run.known
                    else {}
                ),
                **_sizes(p),
                "options": options(p.parallel),
                "partition": str(p.parallel.partition),
                "times": str(p.basis),
                **({"idle GPUs": mark} if any(idle_gpus) else {}),
            }
            for number, (p, mark) in enumerate(zip(plans, idle_gpus, strict=True), 1)
        ]
    )


def _table(rows: Sequence[dict[str, str]]) -> Table:
    return [*rows[0]], [[*row.values()] for row in rows]


def _sizes(plan: Plan) -> dict[str, str]:
    p = plan.parallel
    sizes = {"tensor": p.tensor, "data": p.replicas or p.data, "pipeline": p.pipeline, "micro": p.micro_batch_size}
    return {name: str(size) for name, size in sizes.items()}


def options(parallel: Parallel) -> str:
    """The schedule's name, and every option that is not at its default."""
    chunks = f" x{parallel.chunks}" if parallel.chunks > 1 else ""
    given = [f"{parallel.schedule.label}{chunks}"]
    given += [f"recompute {parallel.recompute}"] if parallel.recompute is not Recompute.none else []
    zero = f"ZeRO stage {parallel.zero}" if parallel.zero else "sharded optimizer"
    given += [zero] if parallel.sharded_optimizer else []
    given += ["parts by memory"] if parallel.shards is Shards.memory else []
    given += [f"offload {parallel.offload}"] if parallel.offload is not Offload.none else []
    given += [f"sums in {parallel.reduce_dtype}"] if parallel.reduce_dtype is not ReduceDtype.fp32 else []
    given += [f"messages in {parallel.compress}"] if parallel.compress is not Compress.none else []
    given += [f"messages scattered: {parallel.scatter_messages}"] if parallel.scatter_messages != SCATTERS[0] else []
    given += ["sums within nodes first"] if parallel.hierarchical_reduce else []
    given += ["sequence parallel"] if parallel.sequence_parallel else []
    given += [f"experts over {parallel.expert}"] if parallel.expert > 1 else []
    given += [f"context {parallel.context}"] if parallel.context > 1 else []
    given += [f"shares {parallel.shares}"] if parallel.shares else []
    given += [f"islands {parallel.islands}"] if parallel.islands else []
    return ", ".join(given)


def csv_text(plans: Sequence[Plan], run: Run) -> str:
    """A line for each plan, times in seconds; `bound_s` is proved to be below every partition of the row's plan."""
    text = io.StringIO()
    records = [{"rank": number, **_record(plan, run)} for number, plan in enumerate(plans, 1)]
    writer = csv.DictWriter(text, [*records[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in record.items()} for record in records)
    return text.getvalue()


def _record(plan: Plan, run: Run) -> dict[str, object]:
    """Return a plan's values by column. The first ones have the names of the public FASOP's CSV files; its time is
    seconds a step."""
    p, parts, idle_gpus, price = plan.parallel, plan.parts, idle(plan), COST.of_step(plan, run)
    return {
        "mbs": p.micro_batch_size,
        "tp": p.tensor,
        "dp": p.replicas or p.data,
        "pp": p.pipeline,
        "node placement": p.node_order,
        "partition": p.partition,
        "estimated time (step/s)": plan.total,
        "pipeline time": float(parts.pipeline[0]),
        "DP all-reduce time": float(parts.sums[0]),
        "embedding layer all-reduce time": float(parts.embedding[0]),
        "price_per_step": price,
        "train_cost": run.iterations * price if run.known and price is not None else None,
        "gpus": p.world_size,
        **{key: getattr(p, key) for key in _KEYS if key not in _OF_FASOP},
        "optimizer_s": float(parts.optimizer[0]),
        "bound_s": plan.bound,
        "samples_per_s": p.global_batch_size / plan.total,
        "price_per_hour": price_per_hour(plan.nodes),
        "kwh_per_step": ENERGY.of_step(plan, run),
        "train_days": run.days(plan) if run.known else None,
        "lost_to_failures": run.lost(plan),
        "basis": plan.basis,
        "idle_gpus": idle_gpus.gpus,
        "idle_nodes": idle_gpus.where,
    }


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
    seconds = {"pipeline": parts.pipeline[0], "gradients": parts.sums[0], "embedding": parts.embedding[0]}
    terms = " + ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
    return "\n".join(
        [
            "# Found by: " + command.replace("\n", "\n# "),
            f"# Predicted: {plan.total * 1e3:.1f} ms per iteration = {terms}; times {plan.basis}.",
            *(f"{key}: {_yaml(key, value)}" for key, value in _values(q).items() if value != "null"),
            "",
        ]
    )


_KEYS = (
    *("tensor", "data", "replicas", "pipeline", "expert", "context", "partition", "sequence_parallel", "recompute"),
    *("sharded_optimizer", "zero", "shards", "offload", "reduce_dtype", "compress", "scatter_messages"),
    *("hierarchical_reduce", "micro_batch_size", "global_batch_size", "schedule", "chunks", "shares", "islands"),
    "node_order",
)
"""What a plan is, by key of `parallel`."""
_OF_FASOP = ("tensor", "data", "replicas", "pipeline", "partition", "micro_batch_size", "node_order")
"""Keys that are columns of the public FASOP's, too, under its names."""


def _values(parallel: Parallel) -> dict[str, str]:
    """What a plan is, by key of `parallel`; null where it goes without saying."""
    values = {key: getattr(parallel, key) for key in _KEYS}
    values |= {size: None for size in _COUNTS if values[size] == 1}
    if parallel.zero:  # which says it
        del values["sharded_optimizer"]
    return {key: _text(value) for key, value in values.items()}


def _yaml(key: str, value: str) -> str:
    texts = ("replicas", "partition", "scatter_messages", "shares", "islands", "node_order")
    return f'"{value}"' if key in texts else value


def launch_words(overrides: Sequence[str], plans: Sequence[Plan], length: Mapping[str, str]) -> list[list[str]]:
    """For each plan the words by which `tdpp launch` trains with it: those of a search, with the plan's values.
    `length` is the key and value of the training's length, where the search alone was told it."""
    _, others = split(overrides)
    configured = {str(key): value for key, value in compose_unchecked(others).parallel.items()}
    return [with_values(others, {**launched_with(plan, configured), **length}) for plan in plans]


def launched_with(plan: Plan, configured: Mapping[str, object]) -> dict[str, str]:
    """The overrides that make a configuration launch this plan, without what its own `parallel` has, too."""
    counts = {key: str(getattr(plan.parallel, key)) for key in _COUNTS}
    return {
        f"parallel.{key}": value
        for key, value in {**_values(plan.parallel), **counts}.items()
        if key in ALWAYS or value != _text(configured.get(key))
    }


_COUNTS = ("expert", "context")
"""Sizes that are left out where they are 1, and that a launch is told where its configuration has others."""
ALWAYS = ("tensor", "data", "pipeline", "partition", "micro_batch_size", "node_order")
"""The keys that say what a plan is, as people read it."""


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
