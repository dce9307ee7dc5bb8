"""Why a typical iteration of a run takes as long as it does: all that `reports/path` finds, for its pages.

A cause is what a run has beyond what its plan would take on healthy, equal hardware, with layers and micro-batches
divided evenly:

- a rank that computes longer than its peers, or takes longer for the optimizer or between the recorded events;
- messages that take longer than others like them, or messages and collectives that take an order of magnitude longer
  than their bytes cost on the links that the configuration describes (`reports/path/links.py`);
- loading data, and pauses between iterations that no key asks for: a plan has no time for either;
- layers, micro-batches or the embedding of a large vocabulary that lie unevenly on the stages and replicas.

All else is what the plan itself takes: collectives that take what their bytes cost, the optimizer, checkpoints,
evaluations. What it would gain not to have them is listed, but they are no cause. Neither is what happens once or
twice, nor that all ranks compute longer in the same iteration, which says that the machine was busy.

Causes are judged without waits for CPU cores (`reports/path/graph.py`), gains with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from conf.run_folder.gpu_lines import WAYS_OUT
from conf.visible import numbered, plural, rank_ranges
from fasop.search.findings.other_plans import FoundPlan
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.statistics import Statistics
from reports.path.balance import other_shares
from reports.path.change import MANY, Cause, Gain
from reports.path.critical import Segment, critical_path, idle_frame
from reports.path.graph import on_own_cores
from reports.path.graph_of_events import make_graphs
from reports.path.irregular import between_iterations, long_iterations
from reports.path.links import Allowed
from reports.path.slow_ranks import Expected
from reports.path.what_if import gains, largest
from reports.readers.events import Timeline
from reports.readers.gpus import GpuReport

ITERATIONS = MANY
"""That changes are replayed in; where a run has fewer, all of them."""
CLOSE = 0.02
"""The part by which the replay of iterations as they were may miss what they took."""
REMEDIES = {Cause.RANK: (Cause.PARTITION, Cause.SHARES), Cause.EMBEDDING: (Cause.PARTITION,)}
"""What a slow rank, or the embedding of a large vocabulary, makes look uneven: with fewer layers there, the rest waits
less."""
CLEAR = 0.05
"""What a cause takes in each iteration beyond what the plan would, as a part of one without waits for CPU cores."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a usual iteration takes as long as it does."""

    iteration: int
    """That the path and the idle times are of."""
    iterations: Sequence[int]
    """That changes were replayed in: those nearest to the median, the nearest first."""
    path: Sequence[Segment]
    """First to last; together they are the iteration."""
    gains: Sequence[Gain]
    idle: pd.DataFrame
    """`idle_frame`."""
    replayed_ms: float
    """What each of many such iterations takes, one after another."""
    recorded_ms: float
    """Median over the steady iterations."""
    ratio: float
    """What iterations take as replayed without a change, relative to what they took: the median of `iterations`."""
    conditions: Sequence[str]
    """What on its hosts makes times uncertain: shared cores, other processes, throttled GPUs; a sentence each."""
    replayed: int
    """Changes that were replayed."""
    absent: Sequence[int]
    """Ranks without events in it."""
    streams: bool = False
    """Whether nothing is flushed, so that the path goes over several iterations."""
    searched: bool = False
    """Whether plans of a search are among the changes that were tried."""

    @property
    def length_ms(self) -> float:
        """How long the path is."""
        return sum(segment.lasts_ns for segment in self.path) / 1e6

    @property
    def replay_error(self) -> float:
        """The part by which the replay of iterations as they were misses what they took."""
        return abs(self.ratio - 1)

    @property
    def tried(self) -> Sequence[Gain]:
        """Gains by the run's own events: what a search predicts is no cause."""
        return [one for one in self.gains if one.cause != Cause.PLAN]

    @property
    def cause(self) -> Gain | None:
        """The gain that stands out: in each iteration at least CLEAR is beyond what its plan would take, and as much as
        of any other cause usually is."""
        faults = sorted((one for one in self.tried if one.excess), key=lambda one: -one.usual_excess)
        if self.replay_error > CLOSE or not faults:
            return None
        best = faults[0]
        behind = (one for one in faults if best.cause in REMEDIES.get(one.cause, ()) and one.least_excess > 0)
        behind_it = next(behind, best)
        best = behind_it if behind_it.usual_excess > best.usual_excess / 2 else best
        same = (best.cause, *REMEDIES.get(best.cause, ()))
        others = [one.usual_excess for one in faults if one.cause not in same]
        return best if best.least_excess >= max([CLEAR, *others]) else None

    @property
    def listed(self) -> Sequence[Gain]:
        """The cause first, then the largest."""
        cause = self.cause
        return [*([cause] if cause else ()), *(one for one in self.gains if one is not cause)]


@dataclass(frozen=True)
class Unexplained:
    reason: str
    """A sentence."""


def explain(
    timeline: Timeline,
    plan: Plan,
    figures: Statistics,
    searched: Sequence[FoundPlan] | None = None,
    expected: Expected | None = None,
    gpus: GpuReport | None = None,
    allowed: Allowed | None = None,
) -> Why | Unexplained | None:
    """Explains a run that has a steady iteration of some length; None without one. `searched`: what a search found for
    its GPUs; `expected`: what is predicted of its stages; `allowed`: what its messages and collectives may take."""
    recorded_ms = figures.usual_period_ms
    if not recorded_ms:
        return None
    numbers = _alike(figures)
    try:
        graphs = make_graphs(timeline, plan.ranks, numbers, plan.stream is not None, plan.islands or ())
    except ReportError as error:
        return Unexplained(f"No critical path: {error}.")
    graph = graphs[0]
    took = dict(zip(figures.iterations.tolist(), figures.period_ns.tolist(), strict=True))
    alone = on_own_cores(graphs)
    found = [
        *gains(graphs, plan, searched or (), expected, allowed),
        *other_shares(timeline, alone, graphs, plan),
        *long_iterations(timeline, plan, figures, alone[0], ITERATIONS),
        *between_iterations(plan, figures, ITERATIONS),
    ]
    return Why(
        iteration=graph.iteration,
        iterations=numbers,
        path=critical_path(graph),
        gains=largest([one if one.mean else replace(one, before_ns=round(recorded_ms * 1e6)) for one in found]),
        replayed=len(found),
        conditions=conditions(timeline, plan, figures, gpus),
        idle=idle_frame(graph, plan),
        replayed_ms=graph.now_ns / 1e6,
        ratio=float(np.median([one.now_ns / max(took[one.iteration], 1) for one in graphs])),
        recorded_ms=recorded_ms,
        absent=[place.rank for place in plan.ranks if place.rank not in graph.last],
        streams=graph.streams,
        searched=searched is not None,
    )


def _alike(figures: Statistics) -> list[int]:
    """The numbers of the ITERATIONS most usual iterations, as far as they are like the first: ranks record as many
    events, and they take neither half nor twice as long."""
    usual = figures.usual
    periods = figures.period_ns[usual] / figures.period_ns[usual[0]]
    alike = (figures.events[:, usual] == figures.events[:, usual[:1]]).all(axis=0)
    chosen = usual[alike & (periods > 1 / 2) & (periods < 2)][:ITERATIONS]
    return [int(number) for number in figures.iterations[chosen]]


WAITS = 0.02
"""The part of an iteration from which a rank's wait for a core is reported."""
AT_LIMIT = 0.97
"""The part of its power limit from which a GPU is slowed by it."""
OFTEN = 0.05
"""The part of a GPU's readings from which a reason for lower clocks is reported."""


def conditions(timeline: Timeline, plan: Plan, figures: Statistics, gpus: GpuReport | None) -> list[str]:
    """A sentence for each host and GPU of which there is something to say. A rehearsal computes nothing."""
    if plan.rehearsal is not None:
        return []
    waits = core_waits(timeline, figures)
    hosts: dict[str, list[int]] = {}
    for rank, host in timeline.hosts.items():
        hosts.setdefault(host, []).append(rank)
    return [message for host, ranks in hosts.items() if (message := _host(timeline, host, ranks, waits))] + [
        *(_gpus(gpus) if gpus is not None else ())
    ]


def core_waits(timeline: Timeline, figures: Statistics) -> dict[int, float]:
    """Returns by rank, where known, the part of an iteration for which it waits for a CPU core: the median over the
    steady iterations."""
    periods = dict(
        zip(figures.iterations[figures.steady].tolist(), figures.period_ns[figures.steady].tolist(), strict=True)
    )
    waits = timeline.core_waits
    steady = waits[waits["iteration"].isin(periods.keys())]
    shares = steady["ns"] / steady["iteration"].map(periods)
    return {int(rank): float(np.median(own)) for rank, own in shares.groupby(steady["rank"])}


def _host(timeline: Timeline, host: str, ranks: list[int], waits: Mapping[int, float]) -> str:
    cores, load = timeline.cores.get(host), timeline.load.get(host)
    long = {rank: waits[rank] for rank in ranks if waits.get(rank, 0.0) > WAITS}
    shared = cores is not None and len(ranks) > cores
    if not shared and not long:
        return ""
    message = f"Other processes compute on the CPU cores of {host}"
    if cores is not None and shared:
        message = f"{plural(len(ranks), 'rank')} share {plural(cores, 'CPU core')} of {host}"
    if cores is not None and load is not None and shared and load > cores:
        message += f" with other processes (load average {load:.1f} when they began)"
    if long:
        most = max(long, key=lambda rank: long[rank])
        which = "ranks" if len(long) == len(ranks) > 1 else numbered("rank", long)
        up_to = "up to " if len(long) > 1 else ""
        message += (
            f"; {which} wait{'s' if len(long) == 1 else ''} for a core for {up_to}{long[most]:.0%} of an iteration"
        )
    return f"{message}."


def _gpus(gpus: GpuReport) -> Iterator[str]:
    for (node, index), reasons in gpus.throttled.items():
        reason, share = next(((reason, share) for reason, share in reasons.items() if share >= OFTEN), (None, 0.0))
        if reason is not None:
            message = f"GPU {index} of {node} lowers its clocks in {share:.0%} of its readings: {reason}"
            yield f"{message}; {WAYS_OUT[reason]}."
    for node, own in gpus.uses.groupby("node", sort=False):
        limited = own["index"][own["power_w"] >= AT_LIMIT * own["power_limit_w"]].tolist()
        if len(limited) > 1:
            yield f"GPUs {rank_ranges(limited)} of {node} run at their power limits."
        elif limited:
            yield f"GPU {limited[0]} of {node} runs at its power limit."
    for node, numbers in gpus.shared.items():
        yield f"Other processes compute on {numbered('GPU', numbers)} of {node}."
