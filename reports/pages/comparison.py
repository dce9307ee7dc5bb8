"""Several runs beside each other: what was different, what they reached, which are best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conf.identity import identity
from conf.schema.experiment import Experiment
from fasop.simulation.predict import Prediction
from reports.facts.frames import PEAKS
from reports.facts.learning import learned
from reports.facts.side_by_side import Facts, facts
from reports.figures.page import leaves
from reports.readers.hardware import price
from reports.readers.judgement import Verdict
from reports.readers.record import Record
from reports.sections.figures_section import last_loss, settled, utilisation

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
    tokens_per_s: float
    utilisation: float
    """Of the GPUs' peaks, in model operations."""
    dollars: float
    """For a million tokens, if the prices of all its nodes are known."""
    memory_gib: float
    """The most that a rank took."""
    loss: float
    """The last logged."""
    emulated: bool = False
    """A rehearsal: its times were given, and nothing was computed."""
    facts: Facts = field(default_factory=Facts)

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or has nothing to compare."""
        return not self.iteration_ms > 0 or (self.verdict is not None and self.verdict.exit_code != 0)


def outcome(
    record: Record,
    verdict: Verdict | None,
    link: str,
    prediction: Prediction | None = None,
    busy: Mapping[str, float] | None = None,
) -> Outcome:
    """Of one run."""
    tokens_per_s, iteration_ms = _number(settled(record, "tokens_per_s")), _number(settled(record, "elapsed_ms"))
    known = price(record.plan, record.experiment) if record.experiment else None
    emulated = record.plan.rehearsal is not None
    ranks = () if emulated else record.memory.values()  # of a rehearsal it is not that of the model
    mib = [kinds[kind] for kinds in ranks for kind in PEAKS if kind in kinds]
    priced = known is not None and known.per_hour and not known.unknown
    return Outcome(
        name=record.name,
        link=link,
        verdict=verdict,
        settings=_settings(record.experiment) if record.experiment else {},
        iteration_ms=iteration_ms,
        tokens_per_s=tokens_per_s,
        utilisation=_number(utilisation(record)),
        dollars=known.per_hour / 3600 / tokens_per_s * 1e6 if known and priced else math.nan,
        memory_gib=max(mib) / 1024 if mib else math.nan,
        loss=_number(last_loss(record)[1]),
        emulated=emulated,
        facts=facts(record, learned(record), iteration_ms, prediction, busy),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _settings(experiment: Experiment) -> dict[str, str]:
    known = leaves(json.loads(identity(experiment)))
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in known}


def swept(outcomes: Sequence[Outcome]) -> list[str]:
    """The keys in which the runs differ, in the order of the configuration; of a named part, its name alone."""
    keys = dict.fromkeys(key for one in outcomes for key in one.settings)
    differ = [key for key in keys if len({one.settings.get(key) for one in outcomes if one.settings}) > 1]
    named = [part for part in ALL_OF if f"{part}.name" in differ]
    return [key for key in differ if key.split(".")[0] not in named or key in [f"{part}.name" for part in named]]


@dataclass(frozen=True, kw_only=True)
class Front:
    """Runs that no other one beats in both throughput and what it takes for it."""

    against: str
    """Name of the field of an Outcome that throughput is weighed against; less of it is better."""
    runs: frozenset[str]
    """Their links."""


def speeds(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of those that did not fail, by link: tokens a second, or iterations where a log does not tell its tokens."""
    sound = [one for one in outcomes if not one.failed]
    if any(math.isnan(one.tokens_per_s) for one in sound):
        return {one.link: 1e3 / one.iteration_ms for one in sound}
    return {one.link: one.tokens_per_s for one in sound}


def rivals(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of which one can be called the best: what was only rehearsed does not stand against what was measured."""
    sound = [one for one in outcomes if not one.failed]
    return [one for one in sound if not one.emulated] or sound


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The run with the highest throughput."""
    speed = speeds(outcomes)
    return max(rivals(outcomes), key=lambda one: speed[one.link], default=None)


def front(outcomes: Sequence[Outcome]) -> Front | None:
    """Of throughput and cost, or, where no prices are known, memory; None where neither is known."""
    speed = speeds(outcomes)
    for against in ("dollars", "memory_gib"):
        takes = {one.link: getattr(one, against) for one in rivals(outcomes)}
        known = {link: (-speed[link], value) for link, value in takes.items() if not math.isnan(value)}
        if known:
            return Front(against=against, runs=frozenset(link for link in known if not _beaten(link, known)))
    return None


def _beaten(link: str, known: Mapping[str, tuple[float, float]]) -> bool:
    """Whether another one is as good in both figures, of which less is better, and better in one."""
    own = known[link]
    return any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in known.values())
