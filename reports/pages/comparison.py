"""What a run reached, to be compared with others: figures of its log with every line behind them, and its settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from conf.identity import identity
from conf.run_folder.iteration_time import IterationTime
from conf.schema.experiment import Experiment
from fasop.simulation.predict import Prediction
from reports.facts.frames import PEAKS
from reports.facts.learning import learned
from reports.facts.side_by_side import Facts, facts
from reports.facts.usual import time_of
from reports.figures.page import leaves
from reports.readers.hardware import peak_tflops, price
from reports.readers.judgement import Verdict
from reports.readers.record import Record
from reports.sections.figures_section import counted, last_loss

OF_LINES = ("iteration_ms", "sample_ms", "tokens_per_s", "samples_per_s", "utilisation", "dollars")
"""Fields of an Outcome that are medians over the lines of its log."""
ALL_OF = ("cluster", "model")
"""Parts of a configuration that have a name: where it differs, what else differs of the part follows from it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run reached. Figures that are not known are NaN."""

    name: str
    link: str
    """To its page, from that of the comparison; no other one has it, which names can share."""
    verdict: Verdict | None
    settings: Mapping[str, str]
    """Every key of its configuration that tells what run it is."""
    iteration_ms: float
    """NaN where the batch changed."""
    tokens_per_s: float
    utilisation: float
    """Of the GPUs' peaks, in model operations."""
    dollars: float
    """For a million tokens, if the prices of all its nodes are known."""
    memory_gib: float
    """The most that a rank took."""
    loss: float
    """The last logged."""
    sample_ms: float = math.nan
    """Where the batch changed."""
    samples_per_s: float = math.nan
    lines: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By name of a field that is a median over the lines of the log: the value of each line that counts."""
    emulated: bool = False
    """A rehearsal: its times were given, and nothing was computed."""
    facts: Facts = field(default_factory=Facts)

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or has nothing to compare."""
        timed = self.iteration_ms > 0 or self.sample_ms > 0
        return not timed or (self.verdict is not None and self.verdict.exit_code != 0)


def outcome(
    record: Record,
    verdict: Verdict | None,
    link: str,
    prediction: Prediction | None = None,
    busy: Mapping[str, float] | None = None,
) -> Outcome:
    """Of one run."""
    time = time_of(record)
    known = price(record.plan, record.experiment) if record.experiment else None
    emulated = record.plan.rehearsal is not None
    ranks = () if emulated else record.memory.values()  # of a rehearsal it is not that of the model
    mib = [kinds[kind] for kinds in ranks for kind in PEAKS if kind in kinds]
    lines = _lines(record, time)
    if known is not None and known.per_hour and not known.unknown:
        lines["dollars"] = [known.per_hour / 3600 / one * 1e6 for one in lines["tokens_per_s"] if one > 0]
    medians = {name: median(values) for name, values in lines.items() if values}
    return Outcome(
        name=record.name,
        link=link,
        verdict=verdict,
        settings=_settings(record.experiment) if record.experiment else {},
        **{name: medians.get(name, math.nan) for name in OF_LINES},
        memory_gib=max(mib) / 1024 if mib else math.nan,
        loss=_number(last_loss(record)[1]),
        lines={name: tuple(values) for name, values in lines.items() if values},
        emulated=emulated,
        facts=facts(record, learned(record), time, prediction, busy),
    )


def _lines(record: Record, time: IterationTime | None) -> dict[str, list[float]]:
    """The lines that count for the iteration time count for what follows from it."""
    lines = {name: counted(record, name) for name in ("tokens_per_s", "samples_per_s")}
    peak = peak_tflops(record.plan, record.experiment) if record.experiment else None
    ranks = len(record.plan.ranks)
    lines["utilisation"] = [one * ranks / peak for one in counted(record, "tflops_per_rank")] if peak else []
    if time is not None:
        lines["sample_ms" if time.per_sample else "iteration_ms"] = list(time.each_ms)
    return lines


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _settings(experiment: Experiment) -> dict[str, str]:
    known = leaves(json.loads(identity(experiment)))
    return {
        key: "none" if value is None else value if isinstance(value, str) else json.dumps(value) for key, value in known
    }


def swept(outcomes: Sequence[Outcome]) -> list[str]:
    """The keys in which the runs differ, in the order of the configuration; of a named part, its name alone."""
    keys = dict.fromkeys(key for one in outcomes for key in one.settings)
    differ = [key for key in keys if len({one.settings.get(key) for one in outcomes if one.settings}) > 1]
    named = [part for part in ALL_OF if f"{part}.name" in differ]
    return [key for key in differ if key.split(".")[0] not in named or key in [f"{part}.name" for part in named]]
