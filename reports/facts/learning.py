"""What a run had learned by what it had spent: its evaluations, and where a quality was first reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from conf.run_folder.iteration_time import Spent
from megatron_ext.contract.goal import LARGER, Best, Target
from reports.readers.hardware import price
from reports.readers.record import Record

EVALUATED = "valid_"
"""Before the names of what an evaluation gives, in metrics.jsonl."""
ALIKE = 1e-6
"""Qualities that differ by less, in proportion, are the same: sums were taken in another order."""
SAMPLES, EPOCHS, HOURS, DOLLARS = "samples", "epochs", "hours", "dollars"


def spent(record: Record) -> pd.DataFrame:
    """Returns by logged line samples, hours of iterations and evaluations; epochs and dollars, where known."""
    metrics, train = record.metrics, record.plan.train
    needed = {"iteration", "elapsed_ms", "consumed_samples"}
    if not needed <= set(metrics):
        return pd.DataFrame(index=metrics.index)
    clock = Spent(max(1, train.log_interval))
    evaluation_s = metrics["evaluation_s"] if "evaluation_s" in metrics else pd.Series(0.0, metrics.index)
    lines = zip(metrics["iteration"], metrics["elapsed_ms"], evaluation_s, strict=True)
    hours = [clock.add(int(iteration), _or_0(ms), _or_0(s)) for iteration, ms, s in lines]
    samples = metrics["consumed_samples"].astype(float)
    found = pd.DataFrame({SAMPLES: samples, HOURS: hours}, index=metrics.index)
    if train.epochs is not None and train.samples:
        found.insert(1, EPOCHS, samples * train.epochs / train.samples)
    if record.experiment is not None:
        cost = price(record.plan, record.experiment)
        if not cost.unknown:
            found[DOLLARS] = found[HOURS] * cost.per_hour
    return found


def _or_0(value: float) -> float:
    return 0.0 if pd.isna(value) else float(value)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The evaluations of a run."""

    evaluations: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row each: `iteration`, what `spent` gives, and the values of the metrics."""
    larger: Mapping[str, bool] = field(default_factory=dict)
    """Whether more is better, for each metric where that is known."""
    target: Target | None = None
    """What the run was to reach."""

    @property
    def metrics(self) -> list[str]:
        """What it was evaluated by."""
        spent = {"iteration", SAMPLES, EPOCHS, HOURS, DOLLARS}
        return [name for name in self.evaluations if name not in spent]

    def best(self, metric: str) -> float:
        """NaN where it has none."""
        if metric not in self.evaluations:
            return math.nan
        values = self.evaluations[metric]
        return float(values.max() if self.larger[metric] else values.min())


def learned(record: Record) -> Learned:
    metrics, train = record.metrics, record.plan.train
    columns = [name for name in metrics if name.startswith(EVALUATED) and metrics[name].notna().any()]
    by_line = spent(record)
    if not columns or by_line.empty:
        return Learned()
    values = metrics[columns].astype(float).rename(columns=lambda name: str(name).removeprefix(EVALUATED))
    every = pd.concat([metrics["iteration"].astype(int), by_line, values], axis=1)
    target = None if train.until is None else Target.parse(train.until)
    larger = {name: LARGER[name] for name in values if name in LARGER}
    if train.best is not None:
        best = Best.parse(train.best)
        larger[best.metric] = best.larger
    if target is not None:
        larger.setdefault(target.metric, target.larger)
    evaluations = every[values.notna().any(axis=1)].reset_index(drop=True)
    return Learned(
        evaluations=evaluations, larger={name: way for name, way in larger.items() if name in values}, target=target
    )


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Where a run first had a quality."""

    run: int
    """Its place among the runs."""
    metric: str
    larger: bool
    quality: float
    at: Mapping[str, float] | None
    """`iteration`, and what had been spent until then; None where it was not reached."""


def time_to_quality(runs: Sequence[Learned]) -> list[Reached]:
    """For each metric that runs have and each quality of `qualities`: all runs with that metric, the quickest first."""
    found = []
    for metric in dict.fromkeys(name for run in runs for name in run.larger):
        having = [(number, run) for number, run in enumerate(runs) if metric in run.larger]
        larger = having[0][1].larger[metric]
        alike = [(number, run) for number, run in having if run.larger[metric] == larger]
        for quality in qualities(metric, [run for _, run in alike]):
            rows = [
                Reached(run=number, metric=metric, larger=larger, quality=quality, at=_first(run, metric, quality))
                for number, run in alike
            ]
            found += sorted(rows, key=lambda row: math.inf if row.at is None else row.at[HOURS])
    return found


def qualities(metric: str, runs: Sequence[Learned]) -> list[float]:
    """The best values of the worst and of the best run, and what runs were to reach; from the easiest one on."""
    larger = runs[0].larger[metric]
    bests = [value for run in runs if not math.isnan(value := run.best(metric))]
    wanted = {run.target.value for run in runs if run.target is not None and run.target.metric == metric}
    ends = {min(bests), max(bests)} if bests else set[float]()
    if ends and math.isclose(min(ends), max(ends), rel_tol=ALIKE):
        ends = {min(ends) if larger else max(ends)}
    return sorted(ends | wanted, reverse=not larger)


def _first(run: Learned, metric: str, quality: float) -> dict[str, float] | None:
    values = run.evaluations[metric]
    alike = ALIKE * abs(quality)
    reached = run.evaluations[values >= quality - alike if run.larger[metric] else values <= quality + alike]
    if reached.empty:
        return None
    columns = [name for name in ("iteration", SAMPLES, EPOCHS, HOURS, DOLLARS) if name in reached]
    return {name: float(value) for name, value in reached[columns].iloc[0].items()}
