"""A run as tables: of events, stages, stragglers, memory and GPUs. Pages, CSV files and notebooks have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import pandas as pd

from fasop.costs.memory.amounts import GIB
from fasop.simulation import iteration
from fasop.simulation.predict import Prediction
from megatron_ext.contract.plan import Plan, StageOfRun
from reports.facts.breakdown import PARTS
from reports.facts.statistics import SLOW_RANK, Statistics
from reports.readers.events import Timeline
from reports.readers.record import Record, stage_contents

TITLES = {
    "forward": "forward",
    "backward": "backward",
    "tensor": "tensor group",
    "messages": "p2p",
    "all_reduce": "all-reduce",
    "bubble": "bubble",
    "imbalance": "imbalance",
    "optimizer": "optimizer",
    "other": "other",
}
"""What pages call the terms."""
MEANING = (
    "Forward and backward: compute, without the communication inside; forward includes the loss. Tensor group: that "
    "communication. p2p: messages between stages, from the time they were sent. All-reduce: of gradients and their "
    "norm, and the all-gather of sharded weights, from the time the last rank of the group began. Bubble: waiting for "
    "other stages. Imbalance: waiting for a slower rank of the same stage. Optimizer: clipping and the update. Other: "
    "time without any of these events."
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Milliseconds, which together are an iteration; reports/facts/breakdown.py says what each is."""

    forward: float
    backward: float
    tensor: float
    messages: float
    all_reduce: float
    bubble: float
    imbalance: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def passes(self) -> float:
        """What a profile measures, which does not tell a tensor group's communication apart."""
        return self.compute + self.tensor

    @property
    def bubble_share(self) -> float:
        """Bubble / (passes + bubble), of a prediction: measured, a rank's passes also hold some of its imbalance."""
        return self.bubble / together if (together := self.passes + self.bubble) > 0 else 0.0

    @classmethod
    def of_prediction(cls, terms: iteration.Terms) -> Terms:
        """Returns the terms of a predicted stage, in which nothing is left over and all ranks are alike."""
        return cls(
            forward=1e3 * terms.forward,
            backward=1e3 * terms.backward,
            tensor=0.0,
            messages=1e3 * terms.messages,
            all_reduce=1e3 * (terms.gradients + terms.embedding + terms.weights),
            bubble=1e3 * terms.bubble,
            imbalance=0.0,
            optimizer=1e3 * terms.optimizer,
            other=0.0,
        )


def measured(figures: Statistics, plan: Plan, iteration_ms: float) -> dict[int, Terms]:
    """Returns for each stage that has events, by its number among `plan.stages`, medians over its ranks and the steady
    iterations. `iteration_ms`: how long an iteration takes; what no event of a rank fills of it is `other`."""
    found = {}
    for number, stage in enumerate(plan.stages):
        ranks = ranks_seen(figures, stage)
        if ranks and figures.steady.any():
            found[number] = terms_of(figures, ranks, iteration_ms)
    return found


def terms_of(figures: Statistics, ranks: Sequence[int], iteration_ms: float) -> Terms:
    """Medians over these ranks and the steady iterations, of which there are some."""
    usual = {part: float(np.median(getattr(figures.spent, part)[ranks][:, figures.steady])) for part in PARTS}
    return Terms(**usual, other=iteration_ms - sum(usual.values()))


def ranks_seen(figures: Statistics, stage: StageOfRun) -> list[int]:
    """The ranks of a stage that have events."""
    return [rank for rank in stage.ranks if figures.events[rank].any()]


EVENTS = (
    "rank",
    "stage",
    "dp",
    "tp",
    "node",
    "task",
    "iteration",
    "micro_batch",
    "chunk",
    "peer",
    "start_ns",
    "end_ns",
)
PEAKS = {
    "max_allocated": "the peak of torch's allocator on the GPU (max_allocated)",
    "max_resident": "the peak resident CPU memory of the process (max_resident)",
}
"""Kinds of memory that tell a rank's peak; a rank has one of them."""
ALLOWANCE = ("fragments", "communicators", "context")
"""What is predicted of a rank's memory beside the tensors that it uses."""
MEMORY = ("weights", "gradients", "optimizer", "activations", "buffers", *ALLOWANCE)
"""Parts of what a stage is predicted to hold."""


def events_frame(record: Record, timeline: Timeline) -> pd.DataFrame:
    """The columns of EVENTS: an event a row, by rank and start; times in ns from the run's first event.

    Micro-batch, chunk and peer are missing where an event has none.
    """
    events = timeline.events.rename(columns={"name": "task"})
    if len(events):
        origin = events["start_ns"].min()
        events["start_ns"], events["end_ns"] = events["start_ns"] - origin, events["end_ns"] - origin
    for key in ("micro_batch", "chunk", "peer"):
        events[key] = events[key].astype("Int32").where(events[key] >= 0)
    plan = record.plan
    places = pd.DataFrame(
        [(rank.stage, rank.dp, rank.tp, plan.node_of(rank.rank)) for rank in plan.ranks],
        index=[rank.rank for rank in plan.ranks],
        columns=["stage", "dp", "tp", "node"],
    ).astype({"stage": "int32", "dp": "int32", "tp": "int32", "node": "category"})
    here = places.reindex(events["rank"])
    return events.assign(**{key: here[key].array for key in places})[list(EVENTS)]


def waiting_frame(record: Record, timeline: Timeline, figures: Statistics) -> pd.DataFrame:
    """The same with `waiting_ns`: the part of each event that is waiting for another rank; 0 where it is not known."""
    return events_frame(record, timeline).assign(waiting_ns=np.maximum(figures.waiting_ns, 0))


def stages_frame(record: Record, figures: Statistics, prediction: Prediction | None = None) -> pd.DataFrame:
    """A row for each stage, by its number, or its name where islands have plans of their own: its layers, the terms of
    an iteration in ms (`reports.facts.frames`), the bubble as a share of passes and bubble, measured and predicted, and
    the largest peak of memory of its ranks, MiB.

    What is not known is missing.
    """
    plan, period_ms = record.plan, figures.usual_period_ms
    times = {} if period_ms is None else measured(figures, plan, period_ms)
    kind = peak_kind(record)
    rows = []
    for number, stage in enumerate(plan.stages):
        known = times.get(number)
        name = number if plan.island_plans is None else stage.name
        row: dict[str, object] = {"stage": name, "layers": stage_contents(stage.plan, stage.number)}
        row |= asdict(known) if known else dict.fromkeys([*PARTS, "other"], np.nan)
        row["bubble_share"] = figures.bubble_of(ranks_seen(figures, stage)) if known else np.nan
        predicted = Terms.of_prediction(prediction.stages[number].terms).bubble_share if prediction else np.nan
        row["predicted_bubble_share"] = predicted
        row["peak_mib"] = peak_mib(record, stage.ranks, kind) if kind else np.nan
        rows.append(row)
    return pd.DataFrame(rows).set_index("stage").astype({"peak_mib": "float64"})


def stragglers_frame(figures: Statistics, plan: Plan) -> pd.DataFrame:
    """The ranks that compute over SLOW_RANK times as long as the others of their stage, the slowest first: `rank`,
    `node`, `stage`, `compute_ms`, `others_ms` (their median), `more` (as a share). Ranks of a stage have the same work,
    so that their computing times can be compared.
    """
    found = []
    steady = figures.steady.any()
    usual = np.median(figures.spent.compute[:, figures.steady], axis=1) if steady else np.zeros(len(plan.ranks))
    for stage in plan.stages if steady else ():
        ranks = ranks_seen(figures, stage)
        for rank in ranks if len(ranks) > 1 else ():
            others = float(np.median([usual[other] for other in ranks if other != rank]))
            if usual[rank] > SLOW_RANK * others > 0:
                found.append((rank, plan.node_of(rank), stage.name, float(usual[rank]), others))
    frame = pd.DataFrame(found, columns=["rank", "node", "stage", "compute_ms", "others_ms"])
    frame["more"] = frame["compute_ms"] / frame["others_ms"] - 1
    return frame.sort_values("more", ascending=False, kind="stable", ignore_index=True)


def memory_frame(record: Record, prediction: Prediction) -> pd.DataFrame:
    """A row for each stage, or each GPU of a stage whose replicas keep unlike parts of it, GiB: the predicted parts
    (MEMORY), their sum, the measured peak of its ranks, the limit of its GPU that has least room, and what is left."""
    peaks = []
    for of_run, stage in zip(record.plan.stages, prediction.stages, strict=True):
        groups: list[str | None] = [one.kind.name for one in stage.held]
        peaks += [peak_mib(record, of_run.ranks, "max_allocated", group) for group in groups or [None]]
    return predicted_memory_frame(prediction, peaks)


def predicted_memory_frame(prediction: Prediction, peaks: list[float | None] | None = None) -> pd.DataFrame:
    """The same of a prediction alone, or beside peaks by row, MiB."""
    rows, names = list[dict[str, float]](), list[str]()
    for stage in prediction.stages:
        of_gpus = [(one.memory, one.kind.gpu.memory_gib) for one in stage.held] or [(stage.memory, stage.limit_gib)]
        names += [f"{stage.name}, {one.kind.gpu.name}" for one in stage.held] or [stage.name]
        for memory, limit in of_gpus:
            parts = {part: amount.of(sum(stage.layers)) / GIB for part, amount in memory.by_term().items()}
            row = {part: parts[part] for part in MEMORY}
            rows.append(row | {"predicted": sum(parts.values()), "limit": limit})
    frame = pd.DataFrame(rows, index=names)
    known = peaks or [None] * len(rows)
    frame["measured"] = [np.nan if peak is None else peak / 1024 for peak in known]
    frame["left"] = frame["limit"] - frame["measured"].fillna(frame["predicted"])
    return frame.rename_axis("stage")


def peak_kind(record: Record) -> str | None:
    """That of PEAKS which the ranks reported; None if none did."""
    return next((kind for kind in PEAKS if any(kind in mib for mib in record.memory.values())), None)


def peak_mib(record: Record, ranks: Sequence[int], kind: str, group: str | None = None) -> float | None:
    """Returns the most MiB of a kind (docs/formats.md) that one of the ranks took, of those on nodes of a `group` if it
    is given; None if none reported it."""
    if group is not None:
        there = {rank for node in record.plan.planned_nodes if node.group == group for rank in node.ranks}
        ranks = [rank for rank in ranks if rank in there]
    known = [record.memory[rank][kind] for rank in ranks if kind in record.memory.get(rank, {})]
    return max(known) if known else None
