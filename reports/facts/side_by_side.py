"""What runs are compared by: the time of an epoch, what was predicted, what they send, what each stage holds,
and in what their machines differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from conf.run_folder.iteration_time import IterationTime, Spread
from fasop.simulation.predict import Prediction
from megatron_ext.contract.events import TRAFFIC
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.stream_check import prove
from reports.facts.frames import peak_kind, peak_mib
from reports.facts.learning import Learned
from reports.facts.statistics import Statistics
from reports.readers.record import Record, stage_contents


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What the ranks of a run sent, in bytes for a sample."""

    by_kind: Mapping[str, float]
    """Bytes of all ranks together, by kind (`megatron_ext.contract.events`)."""
    most: float
    """Bytes of the rank that sent most."""

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """A stage of a run. Figures that are not known are NaN."""

    holds: str
    replicas: int
    ahead: int | None
    """Forward passes that it takes before its first backward pass, without a flush; else None."""
    versions: int
    """The most versions of its weights that are alive at once."""
    predicted_gib: float
    measured_gib: float
    """The most that a rank of it took."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run is compared by. Figures that are not known are NaN."""

    learned: Learned = field(default_factory=Learned)
    model: str = ""
    workers: int = 0
    replicas: Sequence[int] = ()
    """How many forward passes each stage is ahead, in a run without a flush; else empty."""
    data_parallel: bool = False
    """Whether every rank has the whole model."""
    epoch_s: float = math.nan
    samples_per_s: float = math.nan
    speed: Spread | None = None
    """The same with its spread over the lines of the log; None of a batch that adapts, which has a mean."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """The part of an iteration in which ranks compute, by type of GPU; empty without a timeline."""
    predicted_samples_per_s: float = math.nan
    sent: Sent | None = None
    stages: Sequence[StageUse] = ()

    @property
    def depth(self) -> tuple[int, ...]:
        """How many forward passes each stage is ahead, in a run without a flush; else empty."""
        return tuple(stage.ahead for stage in self.stages if stage.ahead is not None)


class Compared(NamedTuple):
    """A run among others."""

    name: str
    link: str
    """The name as HTML, with a link to the run's page."""
    facts: Facts


def facts(
    record: Record,
    learned: Learned,
    time: IterationTime | None,
    prediction: Prediction | None,
    busy: Mapping[str, float] | None = None,
) -> Facts:
    """`time` is its iteration time."""
    plan, train = record.plan, record.plan.train
    if not plan.ranks or not plan.global_batch_size:
        return Facts(learned=learned)
    adapts = plan.adapt is not None and plan.adapt.measures
    batch = 1 if time is not None and time.per_sample else plan.global_batch_size
    speed = Spread.of([batch / one * 1e3 for one in time.each_ms if one > 0] or [math.nan]) if time else None
    samples_per_s = _trained_per_s(record) if adapts or speed is None else speed.median
    in_epoch = train.samples / train.epochs if train.epochs and train.samples else math.nan
    return Facts(
        learned=learned,
        model=record.experiment.model.name if record.experiment else plan.model.family,
        workers=len(plan.ranks),
        replicas=plan.layout.replicas if plan.stream else (),
        data_parallel=plan.pipeline == 1 and plan.tensor == 1,
        epoch_s=in_epoch / samples_per_s,
        samples_per_s=samples_per_s,
        speed=None if adapts else speed,
        busy=busy or {},
        predicted_samples_per_s=plan.global_batch_size / prediction.iteration_s
        if prediction and not adapts
        else math.nan,
        sent=sent(record),
        stages=_stages(record, prediction) if plan.partition or plan.island_plans else (),
    )


def _trained_per_s(record: Record) -> float:
    """Samples a second over all logged lines after the first, whatever batches they had; NaN without two of them."""
    if not {"consumed_samples", "elapsed_ms"} <= set(record.metrics):
        return math.nan
    lines = record.metrics[["iteration", "consumed_samples", "elapsed_ms"]].astype(float).dropna()
    since = lines.diff().iloc[1:]
    seconds = float((since["iteration"] * lines["elapsed_ms"].iloc[1:]).sum()) / 1e3
    return float(since["consumed_samples"].sum()) / seconds if seconds > 0 else math.nan


def busy(figures: Statistics, plan: Plan) -> dict[str, float]:
    """Returns by type of GPU the part of an iteration in which its ranks compute: the mean of their medians."""
    if not (figures.steady.any() and plan.ranks):
        return {}
    usual = np.median(figures.compute_share[:, figures.steady], axis=1)
    by_type: dict[str, list[float]] = {}
    for place, share in zip(plan.ranks, usual, strict=True):
        by_type.setdefault(plan.nodes[place.node].gpu, []).append(float(share))
    return {gpu: float(np.mean(shares)) for gpu, shares in by_type.items() if not np.isnan(shares).any()}


def sent(record: Record) -> Sent | None:
    """None where not all ranks say it."""
    ranks = [record.traffic[rank.rank] for rank in record.plan.ranks if rank.rank in record.traffic]
    if len(ranks) < len(record.plan.ranks) or not ranks or any(not rank.samples for rank in ranks):
        return None
    known = [kind for kind in TRAFFIC if any(rank.bytes.get(kind, 0) for rank in ranks)]
    return Sent(
        by_kind={kind: sum(rank.bytes.get(kind, 0) / rank.samples for rank in ranks) for kind in known},
        most=max(sum(rank.bytes.values()) / rank.samples for rank in ranks),
    )


def _stages(record: Record, prediction: Prediction | None) -> list[StageUse]:
    plan, stream = record.plan, record.plan.stream
    emulated = plan.rehearsal is not None
    kind = None if emulated else peak_kind(record)  # of a rehearsal it is not that of the model
    alive = versions(plan)
    found = []
    for number, stage in enumerate(plan.stages):
        mib = None if kind is None else peak_mib(record, stage.ranks, kind)
        found.append(
            StageUse(
                holds=stage_contents(stage.plan, stage.number),
                replicas=stage.plan.layout.replicas[stage.number],
                ahead=None if stream is None else stream.ahead(number),
                versions=alive[number],
                predicted_gib=math.nan if prediction is None else prediction.stages[number].memory_gib,
                measured_gib=math.nan if mib is None else mib / 1024,
            )
        )
    return found


def versions(plan: Plan) -> Sequence[int]:
    """Returns by stage the most versions of its weights that are alive at once; known before a run starts."""
    if plan.stream is None:
        return [1] * len(plan.stages)
    return prove(plan.stream, 2 * plan.stream.in_flight + 2 * plan.stream.period).versions


def speed_up(run: Facts, runs: Sequence[Facts]) -> float:
    """How many times as fast as data parallelism of the same model on as many workers; NaN without such a run."""
    others = [
        one.samples_per_s
        for one in runs
        if one.data_parallel and (one.model, one.workers) == (run.model, run.workers) and one.samples_per_s > 0
    ]
    return math.nan if run.data_parallel or not others else run.samples_per_s / max(others)


IDS = ("gpus.uuid",)
"""Differ between any two nodes."""


def made_of(machines: Mapping[str, Mapping[str, Any]], images: Sequence[str] = ()) -> dict[str, str]:
    """Returns by dotted key the values of all nodes of a run, each once; `images` are the nodes' containers."""
    found: dict[str, dict[str, None]] = {}
    for machine in machines.values():
        for key, value in _leaves(machine, ""):
            found.setdefault(key, {})[value] = None
    for image in images:
        found.setdefault("image", {})[image] = None
    return {key: ", ".join(sorted(values)) for key, values in found.items() if key not in IDS}


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys in which runs differ. A run that noted nothing differs in none."""
    known = [run for run in runs if run]
    keys = dict.fromkeys(key for run in known for key in run)
    return [key for key in keys if len({run.get(key) for run in known}) > 1]


def _leaves(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, key)
    elif value is not None:
        yield key, str(value)
