"""What a run's events say of each term that `fasop` predicts, for `tdpp search validate=RUN`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conf.run_folder.rundir import RunDir
from fasop.tables.accuracy import Measured, MeasuredStage
from reports.errors import ReportError
from reports.facts.statistics import Statistics, statistics
from reports.readers import events, record
from reports.readers.events import Columns, Timeline
from reports.readers.record import Plan

NORMS = ("grad-norm-all-reduce", "optimizer-clip-main-grad")
"""What ranks of all stages wait for each other in: the second, around the first, in files that do not have that."""
Events = Columns
Floats = NDArray[np.float64]


def measure(run: RunDir) -> Measured:
    """Medians over the steady iterations of a run (reports/facts/statistics.py).

    Raises:
        ReportError: it has no plan, or too few iterations to be measured.
        RunFolderError: its files cannot be read.
    """
    known = record.read(run)
    plan = known.plan
    if not plan.timeline:
        return _logged(known.name, (known.known("elapsed_ms") / 1e3).tolist())
    timeline = events.read_run({rank.rank: run.rank_events(rank.rank) for rank in plan.ranks})
    figures = statistics(timeline, plan.ranks)
    lasted = _lasted(figures)
    absent = [rank.rank for rank in plan.ranks if not figures.events[rank.rank].any()]
    if absent or not len(lasted):
        missing = f"ranks without events: {absent[:5]}" if absent else f"{len(figures.iterations)} iterations"
        raise ReportError(
            f"{known.name} cannot be measured: {missing}; it takes the events of all ranks (profile.timeline=true) and "
            "2 whole iterations after the first"
        )
    ranks = _Ranks(timeline, figures, plan)
    return Measured(
        run=known.name,
        iteration_s=float(np.median(lasted)),
        iterations=len(lasted),
        stages=[_stage(ranks, stage) for stage in range(plan.pipeline)],
        embedding=_together(ranks, "embedding-grads-all-reduce", _ends(plan)),
        emulated=plan.rehearsal is not None,
    )


def _logged(name: str, elapsed_s: Sequence[float]) -> Measured:
    """Without events; the first line has what only happens once."""
    if len(elapsed_s) < 2:
        raise ReportError(f"{name} cannot be measured: it has logged {len(elapsed_s)} times, and it takes 2")
    return Measured(
        run=name,
        iteration_s=float(np.median(elapsed_s[1:])),
        iterations=len(elapsed_s) - 1,
        stages=(),
        embedding=0.0,
        emulated=False,
    )


def _lasted(figures: Statistics) -> Floats:
    """Seconds from the end of an iteration to that of the next one, of those that are steady."""
    end = figures.start_ns + figures.length_ns
    follows = (np.diff(figures.iterations) == 1) & figures.steady[1:]
    return np.asarray(np.diff(end)[follows] / 1e9, np.float64)


class _Ranks:
    """The events of steady iterations."""

    def __init__(self, timeline: Timeline, figures: Statistics, plan: Plan) -> None:
        every = timeline.columns
        self.plan = plan
        self._events = every.at(np.isin(every["iteration"], figures.iterations[figures.steady]))
        self._names = timeline.names

    def of(self, rank: int, name: str) -> Events:
        """Those of a name, in their order."""
        found = self.named(name)
        return found.at(found["rank"] == rank)

    def named(self, name: str) -> Events:
        wanted = self._names.index(name) if name in self._names else -1
        return self._events.at(self._events["name"] == wanted)


def _stage(ranks: _Ranks, stage: int) -> MeasuredStage:
    plan = ranks.plan
    own = [rank.rank for rank in plan.ranks if rank.stage == stage]
    replicas = [
        [rank.rank for rank in plan.ranks if rank.stage == stage and rank.tp == tensor] for tensor in range(plan.tensor)
    ]

    def slowest(names: Sequence[str]) -> list[float]:
        return [
            max(sum(_usual(ranks.of(rank, name), chunk) for name in names) for rank in own)
            for chunk in range(plan.chunks)
        ]

    norm = next((name for name in NORMS if len(ranks.named(name))), None)
    known = 0.0 if norm is None else _together(ranks, norm, [[rank.rank for rank in plan.ranks]])

    def stepping(rank: int) -> float:
        apart = 0.0 if norm is None else _by_iteration(ranks, rank, norm)
        return float(np.median(_by_iteration(ranks, rank, "optimizer") - apart))

    return MeasuredStage(
        forward=slowest(("forward-compute", "loss-compute")),
        backward=slowest(("backward-compute", "backward-input-compute", "backward-weight-compute")),
        send_forward=_transfer(ranks, "forward", own),
        send_backward=_transfer(ranks, "backward", own),
        gradients=_together(ranks, "grads-all-reduce", replicas),
        optimizer=max(map(stepping, own)) + known,
    )


def _usual(found: Events, chunk: int) -> float:
    """Median seconds of the events of a chunk; 0 without any."""
    here = found.at(found["chunk"] == chunk)
    return float(np.median(here["end_ns"] - here["start_ns"])) / 1e9 if len(here) else 0.0


def _by_iteration(ranks: _Ranks, rank: int, name: str) -> Floats:
    """Seconds of a rank's only event of that name in each iteration."""
    found = ranks.of(rank, name)
    return np.asarray((found["end_ns"] - found["start_ns"]) / 1e9, np.float64)


def _together(ranks: _Ranks, name: str, groups: Sequence[Sequence[int]]) -> float:
    """Seconds of a collective once all ranks of its group have begun it: the least that any of them is in it.

    The median over iterations, of the slowest group; 0 where it does not exist.
    """
    lasting = [[_by_iteration(ranks, rank, name) for rank in group] for group in groups]
    return max((float(np.median(np.min(of, axis=0))) for of in lasting if of and len(of[0])), default=0.0)


def _ends(plan: Plan) -> list[list[int]]:
    """The ranks that sum the embedding's gradients together."""
    of = {(rank.stage, rank.dp, rank.tp): rank.rank for rank in plan.ranks}
    last = plan.pipeline - 1
    return [[of[0, dp, tp], of[last, dp, tp]] for dp in range(plan.data) for tp in range(plan.tensor) if last > 0]


def _transfer(ranks: _Ranks, way: str, own: Sequence[int]) -> float | None:
    """Median seconds from when these ranks begin to send until the other has it, of what it was waiting for."""
    sent, received = ranks.named(f"{way}-send"), ranks.named(f"{way}-recv")
    sent, received = sent.at(np.isin(sent["rank"], own)), received.at(np.isin(received["peer"], own))
    if not len(sent) or len(sent) != len(received):
        return None
    sent = sent.at(np.lexsort((sent["start_ns"], sent["peer"], sent["rank"], sent["iteration"])))
    order = np.lexsort((received["start_ns"], received["rank"], received["peer"], received["iteration"]))
    received = received.at(order)
    waited = received["start_ns"] <= sent["start_ns"]
    taken = (received["end_ns"] - sent["start_ns"])[waited]
    return float(np.median(taken)) / 1e9 if len(taken) else None
