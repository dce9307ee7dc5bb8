"""Simulated trainings as a table, as CSV and as plain data for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from conf.visible import plural, span
from fasop.trainings.played import Played, cheapest, front, quickest

PARTS = 10
"""Parts of a training whose epochs nobody knows."""
DIGITS = 3
"""Digits of times, which differ little between sets of nodes."""
HEAD = ("nodes", "GPUs", "batch", "iterations", "time", "$", "")


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was played."""

    trainings: Sequence[Played]
    """Each on nodes of its own."""
    own: str
    """The name of the nodes that the plan itself names."""
    epoch: float | None
    """Samples; None: not known."""
    elastic: Played | None = None

    @cached_property
    def front(self) -> list[Played]:
        return front(self.trainings)

    @cached_property
    def quickest(self) -> Played:
        return quickest(self.trainings)

    @cached_property
    def cheapest(self) -> Played | None:
        return cheapest(self.trainings)

    @property
    def span(self) -> tuple[float, str]:
        """Samples of the parts that a training is told in, and what they are."""
        whole = self.quickest.consumed
        return (whole / PARTS, f"1/{PARTS} of the training") if self.epoch is None else (self.epoch, "epoch")

    @cached_property
    def ordered(self) -> list[Played]:
        """The quickest first."""
        return sorted(self.trainings, key=lambda one: (one.seconds, one.name))

    def marks(self, one: Played) -> str:
        """What it is among all, in words."""
        found = ["fastest"] if one is self.quickest else []
        found += ["cheapest"] if one is self.cheapest else []
        if not found and one in self.front:
            found = ["front"]
        if one.name == self.own:
            found.append("as configured")
        return ", ".join(found)


def table(results: Results) -> list[list[str]]:
    """The front, the plan's own nodes, and the training that changes its nodes; under `HEAD`."""
    shown = [one for one in results.ordered if one in results.front or one.name == results.own]
    return [row(results, one) for one in [*shown, *([results.elastic] if results.elastic else [])]]


def row(results: Results, one: Played) -> list[str]:
    """Return the row of one training, under `HEAD`."""
    batch = (
        f"{one.first_batch:,}" if one.first_batch == one.largest_batch else f"{one.first_batch:,}-{one.largest_batch:,}"
    )
    alone = len(one.legs) == 1
    return [
        one.name,
        str(one.legs[0].node_set.gpus) if alone else plural(len(one.legs) - 1, "change"),
        batch,
        f"{one.iterations:,}",
        span(one.seconds, DIGITS),
        dollars(one.dollars),
        results.marks(one),
    ]


def dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def summary(results: Results) -> list[str]:
    """What to know of them, a sentence each."""
    best, cheap, count = results.quickest, results.cheapest, len(results.trainings)
    found = [f"{best.name} is fastest: {spent(best)}"]
    if cheap is None:
        found.append("no cost: some nodes have no price")
    elif cheap is best:
        found[0] = f"{best.name} is fastest and cheapest: {spent(best)}"
    else:
        longer = cheap.seconds / best.seconds
        found.append(f"{cheap.name} is cheapest: {spent(cheap)}, {longer:.2f} times as long as the fastest")
    if results.elastic is not None:
        found.append(elastic_words(results.elastic))
    found.append(
        f"{plural(count, 'set')} of nodes simulated; {len(results.front)} on the Pareto front of time and cost"
    )
    return found


def spent(one: Played) -> str:
    cost = "" if one.dollars is None else f" for ${one.dollars:,.2f}"
    return f"{span(one.seconds, DIGITS)}{cost}"


def elastic_words(one: Played) -> str:
    """What it uses when."""
    if len(one.legs) == 1:
        return f"elastic: {spent(one)}, on {one.legs[0].node_set.name} throughout"
    used = [f"{leg.node_set.name} from sample {leg.trajectory.consumed[0]:,.0f} on" for leg in one.legs]
    return f"elastic: {spent(one)}, on {', '.join(used)}"


def csv_text(results: Results) -> str:
    """A line for each training and epoch (or tenth), behind which what the whole training takes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("training", "epoch", "nodes", "global_batch_size", "seconds", "total_seconds", "total_dollars"))
    span, _ = results.span
    for one in [*results.ordered, *([results.elastic] if results.elastic else [])]:
        for part in one.epochs(span):
            cost = "" if one.dollars is None else f"{one.dollars:.6g}"
            writer.writerow(
                (
                    one.name,
                    part.number,
                    part.nodes,
                    f"{part.batch:.6g}",
                    f"{part.seconds:.6g}",
                    f"{one.seconds:.6g}",
                    cost,
                )
            )
    return text.getvalue()


def as_json(results: Results, notes: Sequence[str]) -> dict[str, Any]:
    """All of it."""
    span, called = results.span
    return {
        "quickest": results.quickest.name,
        "cheapest": None if results.cheapest is None else results.cheapest.name,
        "front": [one.name for one in results.front],
        "epoch_samples": span,
        "epochs_are": called,
        "trainings": [_facts(one, span) for one in results.ordered],
        "elastic": None if results.elastic is None else _facts(results.elastic, span),
        "notes": list(notes),
    }


def _facts(one: Played, span: float) -> dict[str, Any]:
    return {
        "nodes": one.name,
        "seconds": one.seconds,
        "dollars": one.dollars,
        "iterations": one.iterations,
        "samples": one.consumed,
        "legs": [
            {
                "nodes": leg.node_set.name,
                "gpus": leg.node_set.gpus,
                "price_per_hour": leg.node_set.price_per_hour,
                "from_samples": float(leg.trajectory.consumed[0]),
                "restart_s": leg.restart_s,
                "seconds": leg.seconds,
            }
            for leg in one.legs
        ],
        "epochs": [asdict(part) for part in one.epochs(span)],
    }
