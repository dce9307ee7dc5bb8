"""What islands cost each other: how long each waits for the others, and the bytes it sends them."""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd

from conf.visible import plural
from megatron_ext.contract.events import ISLANDS
from reports.facts.breakdown import ISLANDS_MEET, island_of
from reports.facts.statistics import Statistics
from reports.figures.page import Names, number, table
from reports.readers.events import Timeline
from reports.readers.record import Record
from reports.sections.comparison_sections import size

NOTE = (
    "Medians over the steady iterations. An island has come when its last rank has. At the loss: in every iteration, "
    "where the mean loss of all islands is summed. At a common step: until the last island's weights are there; the "
    "sum itself does not count. Sent: weights, by all ranks of the island to other islands, as a mean over iterations."
)
LONG = 0.05
"""Part of an iteration from which a wait is worth other shares."""


def islands_frame(record: Record, timeline: Timeline, figures: Statistics) -> pd.DataFrame:
    """A row an island: its part of the samples, medians of its waits in ms (NaN where no event tells them) and bytes
    that it sends to other islands in an iteration (NaN where they were not counted)."""
    plan = record.plan
    of_rank = island_of(plan.ranks, plan.islands or ())
    taken = [sum(plan.micro_batches[replica] for replica in replicas) for replicas in plan.layout.island_replicas]
    found = pd.DataFrame({"part": np.array(taken) / sum(taken)}).rename_axis("island")
    found["loss_ms"], found["step_ms"] = _waits(record, timeline, figures, of_rank)
    sent = [
        (of_rank[rank], one.bytes.get(ISLANDS, 0.0) / one.samples * plan.global_batch_size)
        for rank, one in record.traffic.items()
        if one.samples
    ]
    by_island = pd.DataFrame(sent, columns=["island", "bytes"]).groupby("island")["bytes"].sum()
    found["bytes"] = by_island if len(sent) == len(plan.ranks) else np.nan
    return found


def _waits(record: Record, timeline: Timeline, figures: Statistics, of_rank: np.ndarray) -> tuple[pd.Series, pd.Series]:
    """Medians by island at the loss and at common steps, ms. Stages take a common step side by side."""
    plan, events = record.plan, timeline.events
    steady = events["iteration"].isin(figures.iterations[figures.steady])
    some = events.assign(waited=np.maximum(figures.waiting_ns, 0) / 1e6)
    some = some[(some["name"] == ISLANDS_MEET) & steady]
    places = pd.DataFrame([(one.rank, one.stage, one.tp) for one in plan.ranks], columns=["rank", "stage", "tp"])
    some = some.assign(island=of_rank[some["rank"]]).merge(places, on="rank")
    some["turn"] = some.groupby(["iteration", "rank"]).cumcount()
    last = some["turn"] == some.groupby(["iteration", "rank"])["turn"].transform("max")
    meets = (some["iteration"] % (plan.train.sync_every or 1) == 0) | (some["iteration"] == plan.train.iterations)
    step = last & meets
    found = []
    for chosen in (some[~step], some[step]):
        arrived = chosen.groupby(["island", "iteration", "stage", "tp"])["waited"].min()
        found.append(arrived.groupby(["island", "iteration"]).max().groupby("island").median())
    return found[0], found[1]


def islands_section(record: Record, timeline: Timeline, figures: Statistics) -> str:
    """The section of a run's page, as HTML; empty of a run without islands."""
    plan = record.plan
    if not plan.islands:
        return ""
    found = islands_frame(record, timeline, figures)
    rows = []
    for island, replicas in enumerate(plan.layout.island_replicas):
        row = found.loc[island]
        nodes = dict.fromkeys(plan.node_of(one.rank) for one in plan.ranks if one.dp in replicas)
        rows.append(
            (
                str(island),
                Names(nodes),
                str(len(replicas)),
                f"{row['part']:.0%}",
                number(row["loss_ms"], ",.1f"),
                number(row["step_ms"], ",.1f"),
                "–" if np.isnan(row["bytes"]) else size(row["bytes"]),
            )
        )
    head = ("island", "nodes", "replicas", "samples", "waited at the loss, ms", "at a common step, ms", "sent")
    return (
        f"<section><h2>Islands</h2><p>{escape(_answer(record, found, figures))}</p>{table(head, rows, kind='numeric')}"
        f'<p class="note">{escape(NOTE)}</p></section>'
    )


def _answer(record: Record, found: pd.DataFrame, figures: Statistics) -> str:
    every, waits, period = record.plan.train.sync_every, found["loss_ms"], figures.usual_period_ms
    said = f"{len(found)} islands take a common step every {plural(every or 1, 'iteration')}."
    if period is None or waits.isna().any():
        return f"{said} There is no steady iteration, so their waits are not known."
    longest = int(waits.idxmax())
    if waits[longest] - waits.min() < LONG * period:
        return f"{said} None waits for another {LONG:.0%} of an iteration or longer."
    return (
        f"{said} Island {longest} waits {waits[longest] / period:.0%} of each iteration for island {waits.idxmin()}: "
        "parallel.shares can give it more of the samples."
    )
