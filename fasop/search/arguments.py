"""The words of `tdpp search` that are not Hydra's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from conf.reading.values import NoValue, above_0, flag, name_of, parse_key_values, path, read_by, whole, words_of
from fasop.errors import SearchError


class Start(StrEnum):
    """When the training is to be submitted."""

    now = "now"


class ExportFormat(StrEnum):
    """Another trainer, in whose words a plan is written."""

    torchtitan = "torchtitan"
    megatron = "megatron"
    flagscale = "flagscale"
    nemo = "nemo"


class First(StrEnum):
    """Which end of a front comes first: of time against cost, or the least energy of time against energy."""

    time = "time"
    cost = "cost"
    energy = "energy"


def _runs(text: str) -> tuple[str, ...]:
    if not all(text.split(",")):
        raise NoValue("must be runs separated by commas: their folders, names or job ids")
    return tuple(text.split(","))


def _first(text: str) -> First:
    if text not in list(First):
        raise NoValue("must be time, cost or energy: the fastest plan, the cheapest or that of least energy first")
    return First(text)


def _export(text: str) -> ExportFormat:
    if text not in list(ExportFormat):
        raise NoValue(
            f"must be {', '.join(ExportFormat)}: the trainer in whose words the plan is written (export=DIR, for "
            f"PipeDream's runtime, belongs to graph=FILE and parallel.schedule=pipedream)"
        )
    return ExportFormat(text)


def _top(text: str) -> int:
    if (number := whole(text)) > MOST_PLANS:
        raise NoValue(f"must be at most {MOST_PLANS}")
    return number


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not text.endswith("%") or not 0 < value <= MOST_SLOWER:
        raise NoValue(f"must be a percentage above 0 and up to {MOST_SLOWER:.0%}, such as 10%")
    return value


def _start(text: str) -> Start:
    if text not in list(Start):
        raise NoValue("must be now: plans are ranked by when a training that is submitted now would end")
    return Start(text)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line asks for; every field but the last is a word."""

    top: int = read_by(_top, 10)
    csv: Path | None = read_by(path, None)
    page: Path | None = read_by(path, None)
    plan: str | None = read_by(name_of("configuration"), None)
    overwrite: bool = read_by(flag, False)
    export: ExportFormat | None = read_by(_export, None)
    """The fastest plan that this trainer can run is also written in its words."""
    profile: str | None = read_by(name_of("profile"), None)
    """The profile of all GPUs."""
    explain: int | None = read_by(whole, None)
    leave_out: bool = read_by(flag, True)
    by_stage: bool | None = read_by(flag, None)
    """Whether plans with replicas or tensor sizes by stage are looked at; None: a quick look."""
    prove: bool = read_by(flag, False)
    robust: float | None = read_by(_percent, None)
    """Plans come by the longest iteration that they have when a part of their nodes takes so much more time."""
    start: Start | None = read_by(_start, None)
    """Plans come by when their training would end if it were submitted then."""
    pareto: First | None = read_by(_first, None)
    max_cost: float = read_by(above_0, math.inf)
    """US dollars, of the whole training."""
    max_days: float = read_by(above_0, math.inf)
    tokens: float | None = read_by(above_0, None)
    """Tokens of the whole training."""
    validate: tuple[str, ...] = read_by(_runs, ())
    """Runs."""
    calibrate: Path | None = read_by(path, None)
    calibration: Path | None = read_by(path, None)
    overrides: tuple[str, ...] = ()
    """Hydra's."""

    @property
    def rows(self) -> int:
        """How many plans a ranking needs: what is shown of them, and the one that is to be explained."""
        return max(self.top, self.explain or 0)

    def limits(self) -> str:
        """Those of a whole training, as they were given; empty without any."""
        given = {"max_cost": self.max_cost, "max_days": self.max_days}
        return " ".join(f"{word}={value:g}" for word, value in given.items() if math.isfinite(value))


WORDS = words_of(Arguments)
"""How each word is read, which is a field of `Arguments`."""


MOST_PLANS = 10_000
"""`top` at most: a search keeps so many plans, and finds the layers of each."""
MOST_SLOWER = 10.0
"""`robust` at most: eleven times as slow."""
OF_VALIDATE = frozenset(("validate", "calibrate", "calibration"))
NOT_OF_PARETO = frozenset(("top", "leave_out", "prove", "by_stage", "robust"))
"""Words that would change nothing."""
NOT_OF_START = frozenset(("top", "pareto", "max_cost", "max_days", "explain", "csv", "page", "robust", "export"))


def parse(argv: Sequence[str]) -> Arguments:
    """Takes the search's own words out of the others.

    Raises:
        SearchError: a word has no such value, or no meaning beside another one.
    """
    own, overrides = parse_key_values(argv, WORDS, SearchError)
    if "pareto" not in own and (limits := [word for word in ("max_cost", "max_days") if word in own]):
        raise SearchError(f"{limits[0]}={own[limits[0]]:g} limits a Pareto front of time and cost: add pareto=time")
    if own.get("pareto") is First.energy and "max_cost" in own:
        raise SearchError(
            f"max_cost={own['max_cost']:g} limits a front of time and cost: use pareto=cost, or max_days with "
            "pareto=energy"
        )
    if "validate" in own and (others := own.keys() - OF_VALIDATE):
        raise SearchError(
            f"validate={','.join(own['validate'])} does not search, so it does not take {', '.join(sorted(others))}, "
            "only calibrate=FILE, calibration=FILE and runs_dir=DIR"
        )
    if "pareto" in own and (others := own.keys() & NOT_OF_PARETO):
        raise SearchError(
            f"pareto={own['pareto']} shows the plans that no other plan found beats, on any number of nodes; it does "
            f"not take {', '.join(sorted(others))}: leave one of them out"
        )
    if "start" in own and (others := own.keys() & NOT_OF_START):
        raise SearchError(
            f"start={own['start']} shows one plan for each time at which more nodes are free; it does not take "
            f"{', '.join(sorted(others))}: leave one of them out"
        )
    return Arguments(**own, overrides=tuple(overrides))
