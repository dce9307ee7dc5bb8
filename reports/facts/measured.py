"""What a run's events say of each term that `fasop` predicts, for `tdpp search validate=RUN`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from conf.run_folder.iteration_time import IterationTime
from conf.run_folder.rundir import RunDir
from conf.visible import numbered, plural
from fasop.tables.accuracy import Measured, MeasuredStage
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.breakdown import BACKWARD, CLIP, EMBEDDING, FORWARD, LOSS, NORM, OPTIMIZER
from reports.facts.frames import waiting_frame
from reports.facts.statistics import Statistics, statistics, time_of
from reports.readers import events, record


def measure(run: RunDir) -> Measured:
    """The iteration time of a run's log, and medians over its steady iterations (reports/facts/statistics.py).

    Raises:
        ReportError: it has no plan, or too few iterations to be measured.
        RunFolderError: its files cannot be read.
    """
    known = record.read(run)
    plan = known.plan
    time = time_of(known)
    if not plan.timeline:
        return _logged(known.name, time, plan.global_batch_size)
    timeline = events.read_run({rank.rank: run.rank_events(rank.rank) for rank in plan.ranks})
    figures = statistics(timeline, plan.ranks, known)
    lasted = _lasted(figures)
    absent = [rank.rank for rank in plan.ranks if not figures.events[rank.rank].any()]
    if absent or not len(lasted):
        missing = plural(len(figures.iterations), "iteration")
        if absent:
            missing = f"no events of {numbered('rank', absent)}"
        raise ReportError(
            f"{known.name} cannot be measured: {missing}; this needs events of all ranks (profile.timeline=true) and "
            f"2 complete iterations after the first"
        )
    every = waiting_frame(known, timeline, figures)
    steady = every[every["iteration"].isin(figures.iterations[figures.steady])]
    times = steady.assign(
        s=(steady["end_ns"] - steady["start_ns"]) / 1e9 / _passes_at_once(steady, plan),
        waited_s=steady["waiting_ns"] / 1e9,
    )
    return Measured(
        run=known.name,
        # By the log, as everywhere; by events where its only line has the start-up in it.
        iteration_s=float(np.median(lasted)) if time is None or time.alone else _seconds(time, plan.global_batch_size),
        iterations=len(lasted) if time is None or time.alone else len(time.each_ms),
        stages=[_stage(times, stage, plan.chunks) for stage in range(plan.pipeline)],
        embedding=_together(times, EMBEDDING, ["dp", "tp"]),
        emulated=plan.rehearsal is not None,
    )


def _passes_at_once(times: pd.DataFrame, plan: Plan) -> pd.Series:
    """Returns for each event how many micro-batches pass at once, of which one has events: those of a replica's streams
    take as long as one of them together."""
    if plan.streams is None:
        return pd.Series(1, index=times.index)
    streams = np.array(plan.streams)
    passes = times["task"].isin([*FORWARD, LOSS, *BACKWARD])
    return pd.Series(np.where(passes, streams[times["dp"].to_numpy()], 1), index=times.index)


def _seconds(time: IterationTime, batch: int) -> float:
    """Returns the seconds of an iteration with the batch of the plan."""
    return (time.ms * batch if time.per_sample else time.ms) / 1e3


def _logged(name: str, time: IterationTime | None, batch: int) -> Measured:
    """Without events; the first line has what only happens once."""
    if time is None or time.alone:
        found = 0 if time is None else 1
        raise ReportError(f"{name} cannot be measured: it logged {found} iterations, and this needs 2")
    return Measured(
        run=name,
        iteration_s=_seconds(time, batch),
        iterations=len(time.each_ms),
        stages=(),
        embedding=0.0,
        emulated=False,
    )


def _lasted(figures: Statistics) -> NDArray[np.float64]:
    """Seconds from the end of an iteration to that of the next one, of those that are steady."""
    end = figures.start_ns + figures.length_ns
    follows = (np.diff(figures.iterations) == 1) & figures.steady[1:]
    return np.asarray(np.diff(end)[follows] / 1e9, np.float64)


def _stage(times: pd.DataFrame, stage: int, chunks: int) -> MeasuredStage:
    """Returns the times of a stage, which are those of its slowest rank. `times`: `waiting_frame` of the steady
    iterations, with the seconds that an event lasts and waits."""
    own = times[times["stage"] == stage]
    usual = own.groupby(["task", "chunk", "rank"], observed=True)["s"].median()

    def slowest(names: Sequence[str]) -> list[float]:
        sums = usual[usual.index.isin(names, level="task")].groupby(["chunk", "rank"]).sum()
        return list(sums.groupby("chunk").max().reindex(range(chunks), fill_value=0.0))

    def transfer(way: str) -> float | None:
        """Returns how long messages took that were waited for, from when the stage began to send them."""
        taken = times[(times["task"] == f"{way}-recv") & times["peer"].isin(own["rank"]) & (times["waited_s"] > 0)]
        return float((taken["s"] - taken["waited_s"]).median()) if len(taken) else None

    steps = own[own["task"].isin([OPTIMIZER, NORM, CLIP])]
    alone = steps["s"].where(steps["task"] == OPTIMIZER, 0.0) - steps["waited_s"]
    return MeasuredStage(
        forward=slowest((*FORWARD, LOSS)),
        backward=slowest(BACKWARD),
        send_forward=transfer("forward"),
        send_backward=transfer("backward"),
        gradients=_together(own, "grads-all-reduce", ["tp"]),
        optimizer=float(alone.groupby([steps["rank"], steps["iteration"]]).sum().groupby("rank").median().max()),
    )


def _together(times: pd.DataFrame, task: str, group: list[str]) -> float:
    """Seconds of a collective once all ranks of its group have begun it: the median over iterations, of the slowest
    group; 0 where it does not exist. Of several in an iteration, such as one for each bucket, the sum."""
    some = times[times["task"] == task]
    turn = some.groupby(["iteration", "rank"]).cumcount()
    each = (some["s"] - some["waited_s"]).groupby([*(some[key] for key in ("iteration", *group)), turn]).min()
    taken = each.groupby(["iteration", *group]).sum()
    return float(taken.groupby(group).median().max()) if len(taken) else 0.0
