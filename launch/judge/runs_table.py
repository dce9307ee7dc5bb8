"""The cells of tables of runs."""

from __future__ import annotations

from conf.visible import loss_text, span
from launch.judge.outlook import outlook
from launch.judge.pace import time_of
from launch.judge.plan_line import short_plan
from launch.judge.verdict import decide
from launch.machine.hostlist import compressed
from launch.observe.observation import Kind, Observation

COLUMNS = ("run", "verdict", "iteration", "loss", "ms/iteration")
"""Of every table of runs."""
MORE_COLUMNS = ("kind", "age", "took", "left", "plan", "hosts")
"""Of `tdpp runs`, behind them."""


def run_row(name: str, seen: Observation) -> list[str]:
    """The cells of `COLUMNS` for a run."""
    last = seen.log[-1] if seen.log else None
    return [
        name,
        str(decide(seen).state),
        _progress(seen),
        loss_text(last.loss) if last and last.loss is not None else "-",
        f"{time.cell} {time.spread.doubt(time.text)}" if last and (time := time_of(seen)) else "-",
    ]


def _progress(seen: Observation) -> str:
    """The last iteration of all; where the batch adapts they are not known, but its samples are."""
    last = seen.log[-1] if seen.log else None
    samples = seen.plan.train.samples
    if not seen.adapts or seen.goal is not None or samples is None:
        return f"{last.iteration if last else 0}/{seen.iterations}"
    if last is None:
        return "0"
    return f"{last.iteration} ({(last.consumed_samples or 0) / samples:.0%} of samples)"


def more_cells(seen: Observation) -> list[str]:
    """The cells of `MORE_COLUMNS` for a run."""
    took = seen.took_s
    return [
        str(seen.kind),
        span(round(max(0.0, seen.now_unix - seen.launched_unix))),
        "-" if took is None else span(took),
        outlook(seen, decide(seen).state).cell,
        short_plan(seen.plan),
        compressed(node.host for node in seen.nodes if node.host and seen.kind is not Kind.rehearsal) or "-",
    ]
