"""Iterations that take longer than others, and what passes between iterations.

The iteration of median length says nothing of them, and yet they may cost more than all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conf.run_folder.rank_ranges import rank_ranges
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.statistics import Statistics
from reports.path.change import Cause, Gain
from reports.path.graph import Graph, Integers, Kind
from reports.path.making import make_graph
from reports.readers.events import Timeline

LONGER = 1.05
"""Times the median, from which an iteration is long."""
MORE = 1.05
"""Times what a rank takes in the usual iteration, from which it takes longer in another."""
KINDS = (
    (Kind.COMPUTE, Cause.RANK, "compute", "computes"),
    (Kind.DATA, Cause.DATA, "load data", "loads data"),
    (Kind.OPTIMIZER, Cause.OPTIMIZER, "update weights", "updates weights"),
    (Kind.HOST, Cause.HOST, "take between the recorded events", "takes between the recorded events"),
)
"""What a rank does itself, as of several and of one."""
TOGETHER = (
    (Kind.MESSAGE, Cause.LINK, "messages", "take"),
    (Kind.TENSOR, Cause.TENSOR, "the communication of tensor groups", "takes"),
    (Kind.EMBEDDING, Cause.EMBEDDING, "the embedding's all-reduce", "takes"),
    (Kind.GRADIENTS, Cause.GRADIENTS, "the gradients' all-reduce", "takes"),
    (Kind.WEIGHTS, Cause.WEIGHTS, "the weights' all-gather", "takes"),
)
"""What ranks do together."""


def long_iterations(timeline: Timeline, plan: Plan, figures: Statistics, usual: Graph) -> Iterator[Gain]:
    """What they would gain if a thing took no longer in them than in the usual iteration.

    They are known by one of them, that of median length.
    """
    steady, number = figures.steady, int(np.flatnonzero(figures.iterations == usual.iteration)[0])
    # An iteration with more events has a larger batch, and takes longer for that reason.
    alike = steady & (figures.events == figures.events[:, [number]]).all(axis=0)
    alike &= figures.samples == figures.samples[number]
    longer = np.flatnonzero(alike & (figures.period_ns > LONGER * figures.period_ns[number]))
    if not len(longer):
        return
    median = float(np.median(figures.period_ns[np.setdiff1d(np.flatnonzero(alike), longer)]))
    middle = longer[np.argsort(figures.period_ns[longer], kind="stable")[(len(longer) - 1) // 2]]
    try:
        graph = make_graph(timeline, plan.ranks, int(figures.iterations[middle]), plan.stream is not None)
    except ReportError:
        return
    now, mean = graph.period_ns(), float(figures.period_ns[alike].mean())
    part = len(longer) / int(alike.sum())
    which = _which(figures.iterations[longer].tolist(), int(alike.sum()))
    for cause, change, because, lasts in _as_usual(graph, usual, plan):
        gained = part * (now - graph.period_ns(lasts))
        yield Gain(
            cause=cause,
            change=f"{change}, as in other iterations",
            because=f"{which} takes {now / 1e6:,.0f} ms, other iterations {median / 1e6:,.0f} ms: {because}.",
            before_ns=round(mean),
            period_ns=round(mean - gained),
            mean=True,
        )


def _which(numbers: Sequence[int], of: int) -> str:
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 1 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"Every {_ordinal(step)} iteration"
    return f"Each of {len(numbers)} of {of} iterations" if len(numbers) > 1 else f"Iteration {numbers[0]}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _as_usual(graph: Graph, usual: Graph, plan: Plan) -> Iterator[tuple[Cause, str, str, Integers]]:
    """What takes longer in an iteration than in the usual one: what about, with it as there, why, and the lengths."""
    for kind, cause, many, one in KINDS:
        then, now = (_sums(of, kind) for of in (usual, graph))
        # A rank that takes its time now and then makes others wait, but not take longer themselves.
        worst = max((now[rank] - then.get(rank, 0) for rank in now), default=0)
        slow = [r for r in now if now[r] > MORE * then.get(r, 0) and now[r] - then.get(r, 0) > worst / 2]
        if not slow:
            continue
        everyone = len(slow) > 1 and len(slow) == len(now)
        ranks = "all ranks" if everyone else f"rank{'s' if len(slow) > 1 else ''} {rank_ranges(slow)}"
        nodes = {plan.node_of(rank) for rank in slow}
        where = f" on {nodes.pop()}" if len(nodes) == 1 and not everyone else ""
        longest = max(slow, key=lambda rank: now[rank] - then.get(rank, 0))
        verb = many if len(slow) > 1 else one
        because = (
            f"{ranks}{where} {verb} {'up to ' if len(slow) > 1 else ''}{now[longest] / 1e6:,.0f} ms in it instead of "
            f"{then.get(longest, 0) / 1e6:,.0f} ms"
        )
        factors = np.ones(max(graph.last) + 1)
        for rank in slow:
            factors[rank] = then.get(rank, 0) / now[rank]
        title = {Kind.COMPUTE: "as fast", Kind.DATA: "as quick to load data", Kind.OPTIMIZER: "as quick to update"}
        change = f"{ranks}{where} {title.get(kind, 'as quick between the events')}"
        yield cause, change, because, graph.scaled(kind, factors)
    for kind, cause, what, takes in TOGETHER:
        before, after = sum(_sums(usual, kind).values()), sum(_sums(graph, kind).values())
        if after > MORE * before:
            lasts = np.where(graph.kind == kind, (graph.lasts_ns * (before / after)).astype(np.int64), graph.lasts_ns)
            because = (
                f"{what} {takes} {after / 1e6:,.0f} ms in it instead of {before / 1e6:,.0f} ms, summed over all ranks"
            )
            yield cause, f"{what} as quick", because, lasts


def _sums(graph: Graph, kind: Kind) -> dict[int, int]:
    """By rank that does it, ns."""
    sums = graph.by_rank(np.where(graph.kind == kind, graph.lasts_ns, 0))
    return {rank: int(sums[rank]) for rank in graph.last if sums[rank]}


def between_iterations(plan: Plan, figures: Statistics) -> Iterator[Gain]:
    """What passes between the end of an iteration and the first event of the next one."""
    gaps = figures.gap_ns
    counted = figures.steady & (np.diff(figures.iterations, prepend=-1) == 1)
    if not counted.any() or not gaps[counted].any():
        return
    mean = float(gaps[counted].mean())
    long = np.flatnonzero(counted & (gaps > gaps[counted].max() / 2))
    lasts = float(np.median(gaps[long])) / 1e6
    after = (figures.iterations[long] - 1).tolist()
    if len(long) > counted.sum() / 2:
        because = f"Between iterations, no rank records anything for {lasts:,.1f} ms"
    else:
        which = _which(after, int(counted.sum()))
        which = which.replace("Each of ", "").replace("Every", "every").replace("Iteration", "iteration")
        because = f"After {which}, the next one begins only {lasts:,.0f} ms later"
    known = _known(plan, after)
    period = float(figures.period_ns[counted].mean())
    yield Gain(
        cause=Cause.BETWEEN,
        change=f"no time for {' and '.join(known)}" if known else "no time between iterations",
        because=f"{because}{f' ({_keys(known)})' if known else ''}.",
        before_ns=round(period + mean),
        period_ns=round(period),
        mean=True,
    )


def _known(plan: Plan, after: Sequence[int]) -> dict[str, str]:
    """What is known to happen after all of these iterations, and the key that says so."""
    train = plan.train
    every = {"evaluations": ("train.eval_interval", train.eval_interval)}
    if train.checkpoint:
        every["checkpoints"] = ("train.save_interval", train.save_interval)
    return {
        what: f"{key}={interval}"
        for what, (key, interval) in every.items()
        if interval and all(number % interval == 0 for number in after)
    }


def _keys(known: dict[str, str]) -> str:
    return ", ".join(f"{what}: {key}" for what, key in known.items())
