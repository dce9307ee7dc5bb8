"""What a run reached, to be compared with others: figures of its log with every line behind them, and its settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from conf.identity import identity, of_speed
from conf.run_folder.iteration_time import IterationTime, Spread, within_spread
from conf.run_folder.judgement import Verdict
from conf.schema.experiment import Experiment
from fasop.simulation.predict import Prediction
from reports.facts.frames import PEAKS
from reports.facts.learning import learned
from reports.facts.side_by_side import Facts, facts, made_of
from reports.facts.statistics import time_of
from reports.figures.page import leaves
from reports.readers.hardware import peak_tflops, price
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
    """The part of the GPUs' peaks that model operations take."""
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
    """The value of each line that counts, by name of a field that is a median over the lines of the log."""
    emulated: bool = False
    """A rehearsal: its times were given, and nothing was computed."""
    facts: Facts = field(default_factory=Facts)
    machines: Mapping[str, str] = field(default_factory=dict)
    """What its nodes are made of, by key."""

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
    """Returns what a run reached."""
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
        loss=math.nan if (loss := last_loss(record)[1]) is None else loss,
        lines={name: tuple(values) for name, values in lines.items() if values},
        emulated=emulated,
        machines=made_of(
            record.machines, [str(one["image"]) for one in record.node_states.values() if one.get("image")]
        ),
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


SEED = "train.seed"
"""Runs that differ in it alone are repeats."""
SPEEDS = ("tokens_per_s", "samples_per_s")
"""What tells how fast a run is, the first that all of them have; else its iterations a second."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Runs that are one for what is compared, at least one."""

    runs: Sequence[Outcome]

    def spread(self, name: str) -> Spread | None:
        """Returns the spread of a field over all log lines where it has lines, else over the runs; None where it
        is not known."""
        values = [value for run in self.runs for value in run.lines.get(name, ())]
        if name not in OF_LINES or not values:
            known = [float(getattr(run, name)) for run in self.runs]
            values = [value for value in known if not math.isnan(value)]
            if len(values) == 1 and name not in OF_LINES:
                return Spread(median=values[0], half=0.0, count=1)  # what it took or reached, of which nothing varies
        return Spread.of(values) if values else None

    def value(self, name: str) -> float:
        """The median, or NaN."""
        found = self.spread(name)
        return math.nan if found is None else found.median

    def setting(self, key: str) -> str:
        """Returns all values that its runs have for a key."""
        return ", ".join(dict.fromkeys(run.settings.get(key, "–") for run in self.runs))

    @property
    def emulated(self) -> bool:
        return self.runs[0].emulated

    @property
    def links(self) -> frozenset[str]:
        return frozenset(run.link for run in self.runs)


def repeats(outcomes: Sequence[Outcome]) -> list[Pool]:
    """Pools the runs of one configuration that did not fail."""
    return _pooled(outcomes, lambda one: {key: value for key, value in one.settings.items() if key != SEED})


def alike_in_speed(outcomes: Sequence[Outcome]) -> list[Pool]:
    """The same, with those together that differ in keys alone that cannot change how fast they are."""
    return _pooled(outcomes, lambda one: of_speed(one.settings))


def _pooled(outcomes: Sequence[Outcome], settings: Callable[[Outcome], Mapping[str, str]]) -> list[Pool]:
    found: dict[Hashable, list[Outcome]] = {}
    for one in outcomes:
        if not one.failed:
            # Of a log nobody knows the configuration.
            key = frozenset(settings(one).items()) if one.settings else one.link
            found.setdefault((one.emulated, key), []).append(one)
    return [Pool(runs=runs) for runs in found.values()]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How fast configurations are."""

    field: str
    """That tells it."""
    pools: Sequence[Pool]
    """At least one, the fastest first; what was only rehearsed does not stand against what was measured."""

    def speed(self, pool: Pool) -> Spread:
        """More is faster."""
        return speed(pool, self.field)

    @property
    def contenders(self) -> Sequence[Pool]:
        """Returns the first pool and all that are not slower than it beyond the noise."""
        first = self.speed(self.pools[0])
        return [pool for pool in self.pools if pool is self.pools[0] or within_spread(first, self.speed(pool))]

    @property
    def best(self) -> Pool | None:
        """The one that is faster than all others; None without others, or where the difference may be noise."""
        return self.pools[0] if len(self.pools) > 1 and len(self.contenders) == 1 else None


def speed_field(outcomes: Sequence[Outcome]) -> str:
    sound = [one for one in outcomes if not one.failed]
    return next((name for name in SPEEDS if not any(math.isnan(getattr(one, name)) for one in sound)), "iteration_ms")


def speed(pool: Pool, name: str) -> Spread:
    """How fast a pool is by a field; of times, their inverse."""
    found = pool.spread(name) or Spread(median=math.nan, half=math.nan, count=0)
    if name in SPEEDS or not found.median > 0:
        return found
    return Spread(median=1e3 / found.median, half=1e3 / found.median * (found.half / found.median), count=found.count)


def ranking(outcomes: Sequence[Outcome]) -> Ranking | None:
    """None where all failed."""
    pools, name = alike_in_speed(outcomes), speed_field(outcomes)
    pools = [pool for pool in pools if not pool.emulated] or pools
    pools = [pool for pool in pools if speed(pool, name).median > 0]
    ordered = sorted(pools, key=lambda pool: -speed(pool, name).median)
    return Ranking(field=name, pools=ordered) if ordered else None


@dataclass(frozen=True, kw_only=True)
class Front:
    """Runs that no other one clearly beats in both throughput and what it takes for it."""

    against: str
    """Name of the field of an Outcome that throughput is weighed against; less of it is better."""
    runs: frozenset[str]
    """Their links."""


def front(outcomes: Sequence[Outcome]) -> Front | None:
    """Returns the front of throughput and cost, or memory where no prices are known; None where neither is known."""
    pools, name = repeats(outcomes), speed_field(outcomes)
    pools = [pool for pool in pools if not pool.emulated] or pools
    for against in ("dollars", "memory_gib"):
        known = [(pool, speed(pool, name), takes) for pool in pools if (takes := pool.spread(against)) is not None]
        if known:
            ahead = [pool for pool, *own in known if not any(_beaten(own, other) for _, *other in known)]
            return Front(against=against, runs=frozenset(link for pool in ahead for link in pool.links))
    return None


def _beaten(own: Sequence[Spread], other: Sequence[Spread]) -> bool:
    """Whether another one is as good in speed and in what it takes, and better in one beyond the noise."""
    as_good = other[0].median >= own[0].median and other[1].median <= own[1].median
    return as_good and not all(within_spread(*pair) for pair in zip(own, other, strict=True))
