"""Iterations that take longer than others, and what passes between iterations.

The iteration of median length says nothing of them, and yet they may cost more than all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conf.visible import numbered
from megatron_ext.contract.plan import Plan
from reports.errors import ReportError
from reports.facts.statistics import Statistics
from reports.path.change import Cause, Gain
from reports.path.graph import EdgeKind, Graph, Integers, on_own_cores
from reports.path.graph_of_events import make_graphs
from reports.readers.events import Timeline

LONGER = 1.05
"""Times the median, from which an iteration is long."""
RECURS = 3
"""Times that something must happen before it is the cause of anything."""
MORE = 1.05
"""Times what a rank takes in the usual iteration, from which it takes longer in another."""
KINDS = (
    (EdgeKind.COMPUTE, Cause.RANK, "computing"),
    (EdgeKind.DATA, Cause.DATA, "loading data"),
    (EdgeKind.OPTIMIZER, Cause.OPTIMIZER, "updating weights"),
    (EdgeKind.HOST, Cause.HOST, "between the recorded events"),
)
"""What a rank does itself."""
TOGETHER = (
    (EdgeKind.MESSAGE, Cause.LINK, "messages", "take"),
    (EdgeKind.TENSOR, Cause.TENSOR, "the communication of tensor groups", "takes"),
    (EdgeKind.EMBEDDING, Cause.EMBEDDING, "the embedding's all-reduce", "takes"),
    (EdgeKind.GRADIENTS, Cause.GRADIENTS, "the gradients' all-reduce", "takes"),
    (EdgeKind.WEIGHTS, Cause.WEIGHTS, "the weights' all-gather", "takes"),
)
"""What ranks do together."""


def long_iterations(timeline: Timeline, plan: Plan, figures: Statistics, usual: Graph, most: int) -> Iterator[Gain]:
    """What they would gain if a thing took no longer in them than in the usual iteration.

    What takes longer is known by that of median length; what it gains is found for others near it, too.
    """
    steady, number = figures.steady, int(np.flatnonzero(figures.iterations == usual.iteration)[0])
    # An iteration with more events has a larger batch, and takes longer for that reason.
    alike = steady & (figures.events == figures.events[:, [number]]).all(axis=0)
    alike &= figures.samples == figures.samples[number]
    longer = np.flatnonzero(alike & (figures.period_ns > LONGER * figures.period_ns[number]))
    if not len(longer):
        return
    median = float(np.median(figures.period_ns[np.setdiff1d(np.flatnonzero(alike), longer)]))
    ordered = longer[np.argsort(figures.period_ns[longer], kind="stable")]
    near = np.argsort(np.abs(np.arange(len(ordered)) - (len(ordered) - 1) // 2), kind="stable")[:most]
    numbers = figures.iterations[ordered[near]].tolist()
    try:
        recorded = make_graphs(timeline, plan.ranks, numbers, plan.stream is not None, plan.islands or ())
    except ReportError:
        return
    graphs = on_own_cores(recorded)
    mean = float(figures.period_ns[alike].mean())
    part = len(longer) / int(alike.sum())
    which = _which(figures.iterations[longer].tolist(), int(alike.sum()))
    which = which[0].upper() + which[1:]
    takes = (
        f"{which} {'take' if which[0].isdigit() else 'takes'} {recorded[0].now_ns / 1e6:,.0f} ms, "
        f"other iterations {median / 1e6:,.0f} ms"
    )
    for cause, change, because, lasts, machine in _as_usual(graphs, usual, plan):
        gained = [graph.now_ns - graph.period_ns(one) for graph, one in zip(graphs, lasts, strict=True)]
        shares = [part * ns / mean for ns in gained]
        yield Gain(
            cause=cause,
            change=f"{change} as in other iterations",
            because=f"{takes}: {because}.",
            before_ns=round(mean),
            shares=shares,
            excess=shares if len(longer) >= RECURS and not machine else (),
            mean=True,
        )


def _which(numbers: Sequence[int], of: int) -> str:
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 1 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"every {_ordinal(step)} iteration"
    return f"{len(numbers)} of {of} iterations" if len(numbers) > 1 else f"iteration {numbers[0]}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _as_usual(
    graphs: Sequence[Graph], usual: Graph, plan: Plan
) -> Iterator[tuple[Cause, str, str, Sequence[Integers], bool]]:
    """What takes longer in the first of some iterations than in the usual one: what about, with it as there, why, the
    lengths in all of them, and whether all ranks work longer, which says nothing of any of them."""
    graph = graphs[0]
    for kind, cause, doing in KINDS:
        then, now = ({rank: ns for rank, ns in of.sums(kind).items() if ns} for of in (usual, graph))
        # A rank that takes its time now and then makes others wait, but not take longer themselves.
        worst = max((now[rank] - then.get(rank, 0) for rank in now), default=0)
        slow = [r for r in now if now[r] > MORE * then.get(r, 0) and now[r] - then.get(r, 0) > worst / 2]
        if not slow:
            continue
        everyone = len(slow) > 1 and len(slow) == len(now)
        ranks = "all ranks" if everyone else numbered("rank", slow)
        nodes = {plan.node_of(rank) for rank in slow}
        where = f" on {nodes.pop()}" if len(nodes) == 1 and not everyone else ""
        longest = max(slow, key=lambda rank: now[rank] - then.get(rank, 0))
        because = (
            f"{ranks}{where} {'spend up to' if len(slow) > 1 else 'spends'} {now[longest] / 1e6:,.0f} ms {doing} "
            f"instead of {then.get(longest, 0) / 1e6:,.0f} ms"
        )
        title = {
            EdgeKind.COMPUTE: "as fast",
            EdgeKind.DATA: "loading data as fast",
            EdgeKind.OPTIMIZER: "updating as fast",
        }
        change = f"{ranks}{where} {title.get(kind, 'as fast between the recorded events')}"
        sums = [one.sums(kind) for one in graphs]
        lasts = [
            one.scaled(kind, {rank: then.get(rank, 0) / (own.get(rank) or max(then.get(rank, 0), 1)) for rank in slow})
            for one, own in zip(graphs, sums, strict=True)
        ]
        yield cause, change, because, lasts, everyone and kind is not EdgeKind.DATA
    for kind, cause, what, takes in TOGETHER:
        before, after = sum(usual.sums(kind).values()), sum(graph.sums(kind).values())
        if after > MORE * before:
            shares = [before / max(sum(one.sums(kind).values()), 1) for one in graphs]
            lasts = [
                np.where(one.kind == kind, (one.lasts_ns * share).astype(np.int64), one.lasts_ns)
                for one, share in zip(graphs, shares, strict=True)
            ]
            because = f"{what} {takes} {after / 1e6:,.0f} ms instead of {before / 1e6:,.0f} ms, summed over all ranks"
            yield cause, f"{what} as fast", because, lasts, False


def between_iterations(plan: Plan, figures: Statistics, most: int) -> Iterator[Gain]:
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
        because = f"After {which}, the next one begins only {lasts:,.0f} ms later"
    known = _known(plan, after)
    keys = ", ".join(f"{what}: {key}" for what, key in known.items())
    period = float(figures.period_ns[counted].mean())
    usual = gaps[long[np.argsort(np.abs(gaps[long] - np.median(gaps[long])), kind="stable")[:most]]]
    shares = (mean / (period + mean) * usual / np.median(gaps[long])).tolist()
    yield Gain(
        cause=Cause.BETWEEN,
        change=f"no time spent on {' and '.join(known)}" if known else "no time between iterations",
        because=f"{because}{f' ({keys})' if known else ''}.",
        before_ns=round(period + mean),
        shares=shares,
        excess=() if known or len(long) < RECURS else shares,
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
