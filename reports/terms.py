"""Where a stage's time of an iteration goes, measured and predicted, in the same terms so that they can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasop import predict
from reports.events import Timeline
from reports.record import Plan, Rank
from reports.statistics import ALL_REDUCE, COMPUTE, OPTIMIZER, SEND, WAIT, Statistics

CLIP = "optimizer-clip-main-grad"
UNKNOWN = np.iinfo(np.int64).min
Integers = NDArray[np.int64]


TITLES = {
    "compute": "compute",
    "messages": "p2p",
    "all_reduce": "all-reduce",
    "waiting": "waiting",
    "optimizer": "optimizer",
    "other": "other",
}
"""What pages call the terms."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Milliseconds, which together are an iteration."""

    compute: float
    """Forward and backward passes."""
    messages: float
    """Between stages: handing over, and waiting for what the other stage has sent already."""
    all_reduce: float
    """Of gradients, from when the last rank of the group begins."""
    waiting: float
    """Until another stage has sent, until the last rank of a group begins an all-reduce."""
    optimizer: float
    other: float
    """The rest of the iteration: data, loss, Python between the events."""

    @property
    def total(self) -> float:
        return self.compute + self.messages + self.all_reduce + self.waiting + self.optimizer + self.other

    @classmethod
    def of_prediction(cls, terms: predict.Terms) -> Terms:
        """Those of a predicted stage, in which nothing is left over."""
        return cls(
            compute=1e3 * (terms.forward + terms.backward),
            messages=1e3 * terms.messages,
            all_reduce=1e3 * (terms.gradients + terms.embedding),
            waiting=1e3 * terms.waiting,
            optimizer=1e3 * terms.optimizer,
            other=0.0,
        )


def measured(timeline: Timeline, figures: Statistics, plan: Plan, iteration_ms: float) -> dict[int, Terms]:
    """By stage that has events: medians over its ranks and the steady iterations.

    Args:
        iteration_ms: how long an iteration takes; what no event of a rank fills of it is `other`.
    """
    waits = waiting_ns(timeline, plan)
    receives, reduces, clip = (_sums_ms(timeline, figures, waits, names) for names in (WAIT, ALL_REDUCE, (CLIP,)))
    spent = {
        "compute": figures.sum_ms(COMPUTE),
        "messages": figures.sum_ms(WAIT + SEND) - receives,
        "all_reduce": figures.sum_ms(ALL_REDUCE) - reduces,
        "waiting": receives + reduces + clip,
        "optimizer": figures.sum_ms(OPTIMIZER) - clip,
    }
    found = {}
    for stage in range(plan.pipeline):
        ranks = [rank.rank for rank in plan.ranks if rank.stage == stage and figures.events[rank.rank].any()]
        if ranks and figures.steady.any():
            usual = {name: float(np.median(values[ranks][:, figures.steady])) for name, values in spent.items()}
            found[stage] = Terms(**usual, other=iteration_ms - sum(usual.values()))
    return found


def _sums_ms(timeline: Timeline, figures: Statistics, waits: Integers, names: Sequence[str]) -> NDArray[np.float64]:
    """(ranks, iterations) summed waiting in the events of these names, ms."""
    events = timeline.events
    wanted = np.isin(events["name"], [index for index, name in enumerate(timeline.names) if name in names])
    n = len(figures.iterations)
    cell = events["rank"][wanted].astype(np.int64) * n + np.searchsorted(
        figures.iterations, events["iteration"][wanted]
    )
    sums = np.bincount(cell, weights=waits[wanted] / 1e6, minlength=len(figures.events) * n)
    return np.asarray(sums.reshape(len(figures.events), n), np.float64)


def waiting_ns(timeline: Timeline, plan: Plan) -> Integers:
    """(events,) the part of each event that is waiting for another rank; 0 where that cannot be told.

    Of a receive it lasts until the other rank begins to send, of an all-reduce until the last rank of its group begins
    (static/waits.js tells the same of a single event).
    """
    events = timeline.events
    waits = np.zeros(len(events), np.int64)
    until = np.full(len(events), UNKNOWN)
    for receive, send, step in (("forward-recv", "forward-send", -1), ("backward-recv", "backward-send", 1)):
        _until_sent(timeline, plan, until, receive, send, step)
    for name, group in _groups(plan.ranks).items():
        _until_all_begun(timeline, until, name, group)
    known = until > UNKNOWN
    waits[known] = np.clip(until[known] - events["start_ns"][known], 0, (events["end_ns"] - events["start_ns"])[known])
    return waits


def _groups(ranks: Sequence[Rank]) -> dict[str, Integers]:
    """By name of an all-reduce: the group of each rank, numbered in any way."""
    stage, dp, tp = (np.array([getattr(rank, key) for rank in ranks]) for key in ("stage", "dp", "tp"))
    sides = {
        "grads-all-reduce": stage * (tp.max() + 1) + tp,
        "layernorm-grads-all-reduce": stage * (dp.max() + 1) + dp,
        "embedding-grads-all-reduce": dp * (tp.max() + 1) + tp,
        CLIP: dp,
    }
    return {name: numbers.astype(np.int64) for name, numbers in sides.items()}


def _named(timeline: Timeline, name: str) -> Integers:
    """Indices of the events of a name."""
    if name not in timeline.names:
        return np.zeros(0, np.int64)
    return np.flatnonzero(timeline.events["name"] == timeline.names.index(name))


def _until_all_begun(timeline: Timeline, until: Integers, name: str, group: Integers) -> None:
    chosen = _named(timeline, name)
    events: NDArray[Any] = timeline.events[chosen]
    keys = events["iteration"] * (group.max() + 1) + group[events["rank"]]
    _, member = np.unique(keys, return_inverse=True)
    last = np.full(len(keys), UNKNOWN)
    np.maximum.at(last, member, events["start_ns"])
    until[chosen] = last[member]


def _until_sent(timeline: Timeline, plan: Plan, until: Integers, receive: str, send: str, step: int) -> None:
    sends, receives = (_with_peer(timeline, _named(timeline, name), len(plan.ranks)) for name in (send, receive))
    if not len(sends) or not len(receives):
        return
    stage = np.array([rank.stage for rank in plan.ranks])
    sent, received = timeline.events[sends], timeline.events[receives]
    sender = stage[received["rank"]] + step
    wrapped = np.where(sender < 0, -1, np.where(sender >= plan.pipeline, 1, 0))
    sizes = (len(plan.ranks), plan.chunks + 2, int(timeline.events["micro_batch"].max()) + 2)
    keys = _keys(sent, sent["rank"], sent["peer"], sent["chunk"], sizes)
    wanted = _keys(received, received["peer"], received["rank"], received["chunk"].astype(np.int64) + wrapped, sizes)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    match = keys[order][place] == wanted
    until[receives[match]] = sent["start_ns"][order[place[match]]]


def _with_peer(timeline: Timeline, chosen: Integers, ranks: int) -> Integers:
    peer = timeline.events["peer"][chosen]
    return chosen[(peer >= 0) & (peer < ranks)]


def _keys(
    events: NDArray[Any], sender: NDArray[Any], receiver: NDArray[Any], chunk: NDArray[Any], sizes: tuple[int, int, int]
) -> Integers:
    """A number for each message; `sizes` are those of ranks, chunks and micro-batches, with one more on each side."""
    ranks, chunks, micro_batches = sizes
    key = events["iteration"].astype(np.int64)
    for value, size in (
        (events["micro_batch"] + 1, micro_batches),
        (chunk + 1, chunks),
        (sender, ranks),
        (receiver, ranks),
    ):
        key = key * size + value
    return key
