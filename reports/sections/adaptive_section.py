"""How a run's parts share its work: batches and shares that change, nodes that come and go, islands, experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
import pandas as pd

from conf.schema.values.partition import dashed
from conf.visible import plural
from megatron_ext.contract.events import ISLANDS
from reports.facts.breakdown import ISLANDS_MEET, island_of
from reports.facts.statistics import Statistics
from reports.figures.chart import lines
from reports.figures.embed import RAISED, SERIES, embedded, figure
from reports.figures.page import Names, Row, number, table
from reports.readers.events import Timeline
from reports.readers.json_lines import Decision
from reports.readers.record import Record
from reports.sections.comparison_sections import size

SAMPLES = "consumed_samples"
HEAD = ("iteration", "samples", "global batch", "shares", "learning rate ×", "similarity", "noise scale", "reason")


def adaptive_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that made no decision."""
    made = record.decisions
    if not made:
        return ""
    charts = [
        _chart([_batches(record)], "Global batch", from_zero=True),
        _chart([_decided(made, "noise scale", lambda one: one.noise_scale)], "Noise scale (samples)", from_zero=True),
        _chart([_decided(made, "similarity", lambda one: one.similarity)], "Similarity of the halves"),
        _chart([_learning_rate(record)], "Learning rate", from_zero=True),
    ]
    changes = [one for one in made if one.changes]
    kept = len(made) - len(changes)
    note = f'<p class="note">{kept} of {len(made)} decisions did not change anything.</p>' if kept else ""
    return (
        f'<section><h2>Adaptation</h2><div class="charts">{"".join(charts)}</div>'
        f"{table(HEAD, map(_row, changes)) if changes else ''}{note}</section>"
    )


def _batches(record: Record) -> pd.Series:
    """Over consumed samples, in steps: a log line has only the batch of its last iteration."""
    points = [(0, record.decisions[0].before)]
    for one in record.decisions:
        points += [(one.consumed_samples, one.before), (one.consumed_samples, one.global_batch_size)]
    logged = record.known(SAMPLES)
    points.append((max(points[-1][0], *map(int, logged.tail(1))), points[-1][1]))
    return pd.Series([batch for _, batch in points], [samples for samples, _ in points], name="global batch")


def _learning_rate(record: Record) -> pd.Series:
    """Over consumed samples."""
    metrics, name = record.metrics, "learning rate"
    if "learning_rate" not in metrics or SAMPLES not in metrics:
        return pd.Series(dtype="float64", name=name)
    return pd.Series(metrics["learning_rate"].astype(float).to_numpy(), metrics[SAMPLES].to_numpy(), name=name).dropna()


def _decided(made: Sequence[Decision], name: str, value: Callable[[Decision], float | None]) -> pd.Series:
    known = {one.consumed_samples: found for one in made if (found := value(one)) is not None}
    return pd.Series(list(known.values()), list(known), name=name, dtype="float64")


def _chart(series: Sequence[pd.Series], title: str, *, from_zero: bool = False) -> str:
    """Nothing where no number is known, as of shares alone."""
    if not any(len(one) for one in series):
        return ""
    figure = lines(series, x_title="samples", title=title, from_zero=from_zero)
    return embedded(figure, f"{title} over samples")


def _row(one: Decision) -> Row:
    return (
        str(one.iteration),
        f"{one.consumed_samples:,}",
        f"{one.before} → {one.global_batch_size}" if one.before != one.global_batch_size else str(one.before),
        f"{dashed(one.shares_before)} → {dashed(one.shares)}"
        + (
            f" of {dashed(one.micro_batch_sizes_before)} → {dashed(one.micro_batch_sizes)} samples"
            if one.resizes
            else ""
        )
        + (f" in {dashed(one.streams_before)} → {dashed(one.streams)} streams" if one.changes_streams else ""),
        number(one.learning_rate_factor, ".4g"),
        number(one.similarity, ".3f"),
        number(one.noise_scale, ",.4g"),
        one.reason,
    )


NODES_HEAD = ("start", "from iteration", "nodes", "without", "with again", "shares", "reason")


def elastic_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that kept its plan."""
    if not record.regroupings:
        return ""
    rows = [
        (
            one.start,
            str(one.iteration),
            f"{len(one.nodes_before)} → {len(one.nodes)}",
            _others(one.nodes_before, one.nodes),
            _others(one.nodes, one.nodes_before),
            " → ".join("-".join(map(str, shares)) for shares in (one.shares_before, one.shares)),
            one.reason,
        )
        for one in record.regroupings
    ]
    return f"<section><h2>Nodes</h2>{table(NODES_HEAD, rows)}</section>"


def _others(nodes: Sequence[str], beside: Sequence[str]) -> str:
    return ", ".join(node for node in nodes if node not in beside) or "–"


ISLANDS_NOTE = (
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
    answer = _islands_answer(record, found, figures)
    return (
        f"<section><h2>Islands</h2><p>{escape(answer)}</p>{table(head, rows, kind='numeric')}"
        f'<p class="note">{escape(ISLANDS_NOTE)}</p></section>'
    )


def _islands_answer(record: Record, found: pd.DataFrame, figures: Statistics) -> str:
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


def experts_section(record: Record) -> str:
    """The section of a run's page, as HTML; empty of a run that counted no experts."""
    if not record.expert_loads:
        return ""
    newest = max(record.expert_loads)
    return (
        '<section><h2>Experts</h2><p class="note">Tokens of an expert, over the mean of its layer: 1 is even, 0 is an '
        f'expert that no token chose.</p><div class="charts">{_by_layer(record.expert_loads[newest], newest)}'
        f"{_over_iterations(record)}</div></section>"
    )


def _by_layer(loads: Sequence[Sequence[float]], iteration: int) -> str:
    rows = len(loads)
    title = f"Load by layer and expert, iteration {iteration}"
    made = figure(title=title, height=min(560, 110 + 22 * rows))
    made.add_heatmap(
        z=[list(row) for row in loads],
        x=list(range(len(loads[0]))),
        y=[str(row) for row in range(rows)],
        zmin=0,
        zmax=max(2.0, *(value for row in loads for value in row)),
        colorscale=[[0, RAISED], [1, SERIES[0]]],
        hovertemplate="layer %{y}, expert %{x}: %{z:.3f}<extra></extra>",
    )
    made.update_xaxes(title_text="expert")
    made.update_yaxes(title_text="layer with experts", autorange="reversed", type="category")
    return embedded(made, title)


def _over_iterations(record: Record) -> str:
    """The busiest and the idlest expert of any layer."""
    series = [
        pd.Series({at: float(choose(loads)) for at, loads in record.expert_loads.items()}, name=name)
        for name, choose in (("busiest", np.max), ("idlest", np.min))
    ]
    made = lines(series, x_title="iteration", title="Load of the busiest and the idlest expert", from_zero=True)
    return embedded(made, "Load of the busiest and the idlest expert over iterations")
