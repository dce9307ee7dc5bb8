"""A run or a log in a notebook: its tables as DataFrames, its figures as Plotly figures (docs/notebooks.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from conf.run_folder.iteration_time import IterationTime, Spread
from conf.run_folder.run_folders import usual_runs_dir
from conf.visible import numbered, plural
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.frames import memory_frame, stages_frame, stragglers_frame, waiting_frame
from reports.facts.statistics import Statistics, statistics, time_of
from reports.figures.chart import lines
from reports.figures.embed import COMPUTE, Place, figure, look
from reports.pages.comparison import OF_LINES, Outcome, outcome
from reports.readers.gpus import USE
from reports.readers.megatron_log import Sizes
from reports.readers.record import rank_label
from reports.sources import Found, Source, all_of


class Run:
    """All that is known of a run, or of a log of Megatron-LM, at the moment of `load`."""

    def __init__(self, found: Found) -> None:
        self._found = found

    def __repr__(self) -> str:
        plan = self.plan
        sizes = " x ".join(f"{key} {size}" for key, size in plan.sizes.items())
        logged, events = len(self.metrics), len(self._found.timeline.events)
        return f"<{self.name}: {sizes}, {plural(logged, 'logged iteration')}, {plural(events, 'event')}>"

    @property
    def name(self) -> str:
        return self._found.record.name

    @property
    def plan(self) -> Plan:
        return self._found.record.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing or was left out, one sentence each."""
        return (*self._found.record.notes, *self._found.timeline.notes)

    @cached_property
    def events(self) -> pd.DataFrame:
        """An event a row, by rank and start; times in ns from the run's first event. `waiting_ns` is the part of an
        event that is waiting for another rank."""
        return waiting_frame(self._found.record, self._found.timeline, self.statistics)

    @property
    def metrics(self) -> pd.DataFrame:
        """A logged iteration a row."""
        return self._found.record.metrics

    @property
    def iteration_time(self) -> IterationTime | None:
        """What pages and tables show, `ms`, with `spread` and `per_sample`; None before the first line of the log."""
        return time_of(self._found.record)

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """An iteration that has events a row: `length_ms`, `period_ms`, and whether it is steady (docs/reports.md)."""
        known = self.statistics
        return pd.DataFrame(
            {"length_ms": known.length_ns / 1e6, "period_ms": known.period_ns / 1e6, "steady": known.steady},
            index=pd.Index(known.iterations, name="iteration"),
        )

    @cached_property
    def statistics(self) -> Statistics:
        """What the pages' figures are made of."""
        return statistics(self._found.timeline, self.plan.ranks, self._found.record)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """A stage a row: its layers, where an iteration's ms go, its bubble measured and predicted, its memory."""
        return stages_frame(self._found.record, self.statistics, self._found.prediction)

    @cached_property
    def stragglers(self) -> pd.DataFrame:
        """Ranks that compute over 5 % longer than the others of their stage, the slowest first."""
        return stragglers_frame(self.statistics, self.plan)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """A stage a row, GiB: predicted by part, measured, limit. Raises ReportError: there is no prediction, as of a
        log."""
        if self._found.prediction is None:
            raise ReportError(
                f"{self.name} has no prediction, so its memory by part is unknown: {'; '.join(self.notes)}"
            )
        return memory_frame(self._found.record, self._found.prediction)

    @property
    def gpus(self) -> pd.DataFrame:
        """A GPU that was sampled a row."""
        return self._found.gpus.uses if self._found.gpus else pd.DataFrame(columns=USE)

    def timeline(self, iteration: int | None = None, ranks: Sequence[int] | None = None) -> go.Figure:
        """The events of an iteration; without one, of a steady one near the median of the log. Raises ReportError: it
        has no events, or the run no such rank."""
        known, middle = self.statistics, self.statistics.middle
        if middle is None:
            raise ReportError(f"{self.name} has no events: {'; '.join(self.notes) or 'none written'}")
        wanted = int(known.iterations[middle]) if iteration is None else iteration
        if wanted not in known.iterations:
            first, last = known.iterations[0], known.iterations[-1]
            raise ReportError(
                f"iteration {wanted} of {self.name} has no events; iterations {first} to {last} have some"
            )
        there = {rank.rank for rank in self.plan.ranks}
        if missing := {*(ranks or ())} - there:
            raise ReportError(f"{self.name} has no {numbered('rank', missing)}; it has {numbered('rank', there)}")
        events = self.events[self.events["iteration"] == wanted]
        labels = {rank.rank: rank_label(rank) for rank in self.plan.ranks if ranks is None or rank.rank in ranks}
        return timeline(events, labels, f"{self.name}, iteration {wanted}")

    def course(self, metric: str) -> go.Figure:
        """A logged metric over iterations. Raises ReportError: it was never logged."""
        values = self._found.record.known(metric)
        if not len(values):
            raise ReportError(f"{self.name} has no metric {metric!r}; it has {', '.join(self.metrics.columns)}")
        return lines([values], x_title="iteration", title=metric)


def load(run: str | Path | None = None, runs_dir: str | Path | None = None, **sizes: int) -> Run:
    """A run, or a log of Megatron-LM: whatever `tdpp report` takes.

    Args:
        run: the latest one if not given.
        runs_dir: where runs are, as for commands: TDPP_RUNS_DIR, or runs.
        sizes: `tensor`, `data`, `pipeline` of a log that does not say them.

    Raises:
        TdppError: there is no such run or log, or it cannot be read.
    """
    return Run(Source.find(_runs_dir(runs_dir), None if run is None else str(run), Sizes(**sizes)).read())


def _runs_dir(given: str | Path | None) -> Path:
    return usual_runs_dir() if given is None else Path(given)


def _reached(one: Outcome) -> dict[str, Any]:
    """A row of `load_sweep`: behind each figure of the log its ± and the number of lines that it is a median of."""
    found: dict[str, Any] = {"name": one.name, "path": one.link, "emulated": one.emulated}
    for key in (*OF_LINES, "memory_gib", "loss"):
        found[key] = getattr(one, key)
        if key in one.lines:
            found[f"{key}_spread"], found[f"{key}_lines"] = Spread.of(one.lines[key]).half, len(one.lines[key])
    return found | dict(one.settings)


def load_sweep(*runs: str | Path, runs_dir: str | Path | None = None) -> pd.DataFrame:
    """Several runs, or all of a folder, a row each: every key of the configuration in which they differ, and what they
    reached. Raises TdppError: one of them cannot be read."""
    wanted = [one for given in runs for one in all_of(str(given))]
    found = [Source.find(_runs_dir(runs_dir), one, Sizes()) for one in wanted]
    outcomes = [outcome(source.read().record, None, str(source.log)) for source in found]
    frame = pd.DataFrame([_reached(one) for one in outcomes]).set_index("name")
    settings = [key for one in outcomes for key in one.settings]
    alike = [key for key in dict.fromkeys(settings) if frame[key].nunique(dropna=False) == 1]
    return frame.drop(columns=alike)


ROW = 36
"""Pixels."""
PALE = "rgba(255, 255, 255, 0.8)"
"""Over the part of a bar that is waiting for another rank."""


def timeline(events: pd.DataFrame, labels: Mapping[int, str], title: str) -> go.Figure:
    """The events of an iteration (`reports.facts.frames.waiting_frame`), in ms from the first of them. `labels`: of the
    ranks, from above to below."""
    rows = {rank: row for row, rank in enumerate(labels)}
    made = figure(barmode="overlay", bargap=0, title=escape(title), height=90 + ROW * len(rows))
    made.update_xaxes(title_text="ms", rangemode="tozero")
    made.update_yaxes(tickvals=list(rows.values()), ticktext=[escape(label) for label in labels.values()])
    made.update_yaxes(range=[len(rows) - 0.5, -0.5], showgrid=False)
    shown = events.assign(
        row=events["rank"].map(rows).astype("float64"),
        start_ms=(events["start_ns"] - events["start_ns"].min()) / 1e6,
        lasts_ms=(events["end_ns"] - events["start_ns"]) / 1e6,
        waits_ms=events["waiting_ns"] / 1e6,
    ).dropna(subset=["row"])
    for task, bars in shown.groupby("task", observed=True, sort=True):
        one = look(str(task))
        made.add_bar(
            name=escape(str(task)),
            marker={"color": one.light, "line": {"width": 0}},
            hovertext=_hover(bars),
            hoverinfo="text",
            **_placed(bars, bars["lasts_ms"], one.place),
        )
    waits = shown[shown["waits_ms"] > 0]
    if len(waits):
        made.add_bar(
            name="waiting",
            marker={"color": PALE, "line": {"width": 0}},
            hoverinfo="skip",
            showlegend=False,
            **_placed(waits, waits["waits_ms"], COMPUTE),
        )
    return made


def _placed(bars: pd.DataFrame, lasts_ms: pd.Series, place: Place) -> dict[str, object]:
    """Where bars lie; those of several tasks each in the place of its own."""
    places = [look(str(task)).place for task in bars["task"]]
    places = [place if one.lane == place.lane else one for one in places]
    return {
        "orientation": "h",
        "base": bars["start_ms"].tolist(),
        "x": lasts_ms.tolist(),
        "y": [row + (one.top + one.bottom) / 2 for row, one in zip(bars["row"], places, strict=True)],
        "width": [one.bottom - one.top for one in places],
    }


def _hover(bars: pd.DataFrame) -> list[str]:
    texts = []
    for bar in bars.itertuples():
        parts = [f"<b>{escape(str(bar.task))}</b>", f"rank {bar.rank} · stage {bar.stage} · {escape(str(bar.node))}"]
        parts += [f"micro-batch {bar.micro_batch}, chunk {bar.chunk}"] if pd.notna(bar.micro_batch) else []
        parts += [f"peer rank {bar.peer}"] if pd.notna(bar.peer) else []
        parts += [f"start {bar.start_ms:,.3f} ms, duration {bar.lasts_ms:,.3f} ms"]
        parts += [f"of which {bar.waits_ms:,.3f} ms waiting"] if bar.waits_ms > 0 else []
        texts.append("<br>".join(parts))
    return texts
