"""What the depth of a pipeline without a flush changes: runs that differ in `parallel.depth`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from reports.facts.side_by_side import Compared, Facts
from reports.figures.chart import lines
from reports.figures.embed import embedded
from reports.figures.page import Cell, Row, number, table
from reports.sections.comparison.throughput import samples_per_s


def depth_section(runs: Sequence[Compared]) -> str:
    """As HTML; empty where no two runs of the same stages have unlike depths."""
    alike: dict[tuple[object, ...], list[Compared]] = {}
    for run in runs:
        if run.facts.depth:
            alike.setdefault(_stages(run.facts), []).append(run)
    several = [group for group in alike.values() if len({run.facts.depth for run in group}) > 1]
    return f"<section><h2>Depth</h2>{''.join(map(_group, several))}</section>" if several else ""


def _stages(facts: Facts) -> tuple[object, ...]:
    return facts.model, tuple(facts.replicas), tuple(stage.holds for stage in facts.stages)


def _group(runs: Sequence[Compared]) -> str:
    """Of runs with the same stages, the shallowest first."""
    ordered = sorted(runs, key=lambda run: run.facts.depth)
    rows: list[Row] = []
    for run in ordered:
        stages = run.facts.stages
        best = ", ".join(f"{name} {run.facts.learned.best(name):.4g}" for name in run.facts.learned.larger)
        rows.append(
            (
                Cell(run.link),
                "-".join(map(str, run.facts.depth)),
                "-".join(str(stage.versions) for stage in stages),
                samples_per_s(run.facts),
                number(run.facts.predicted_samples_per_s, ",.1f"),
                number(stages[0].predicted_gib, ",.3f"),
                number(stages[0].measured_gib, ",.3f"),
                best or "–",
            )
        )
    head = ("run", "depth", "versions", "samples/s", "predicted samples/s", *_GIB, "best quality")
    title = "Samples per second over forward passes ahead on the first stage"
    places = [run.facts.depth[0] for run in ordered]
    measured = pd.Series([run.facts.samples_per_s for run in ordered], places, name="measured")
    predicted = pd.Series([run.facts.predicted_samples_per_s for run in ordered], places, name="predicted").dropna()
    known = [one for one in (measured, predicted) if len(one)]
    drawn = lines(known, x_title="forward passes ahead on stage 0", title="samples/s", from_zero=True)
    return f'{table(head, rows, kind="depth")}<div class="charts">{embedded(drawn, title)}</div>'


_GIB = ("stage 0 predicted GiB", "stage 0 measured GiB")
