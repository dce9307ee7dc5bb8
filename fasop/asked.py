"""The words of `tdpp search` that are not Hydra's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fasop.errors import SearchError


class First(StrEnum):
    """Which end of a front of time against cost comes first."""

    time = "time"
    cost = "cost"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks for; every field but the last is a word."""

    top: int = 10
    csv: Path | None = None
    page: Path | None = None
    plan: str | None = None
    overwrite: bool = False
    explain: int | None = None
    leave_out: bool = False
    pareto: First | None = None
    max_cost: float = math.inf
    """US dollars, of the whole training."""
    max_days: float = math.inf
    tokens: float | None = None
    """Of the whole training."""
    validate: tuple[str, ...] = ()
    """Runs."""
    calibrate: Path | None = None
    calibration: Path | None = None
    overrides: tuple[str, ...] = ()
    """Hydra's."""


OF_VALIDATE = frozenset(("validate", "calibrate", "calibration"))
NOT_OF_PARETO = frozenset(("top", "leave_out"))
"""Words that would change nothing."""


def parse(argv: Sequence[str]) -> Asked:
    """Takes the search's own words out of the others; of a word that comes twice the last one counts.

    Raises:
        SearchError: a word has no such value, or no meaning beside another one.
    """
    own: dict[str, Any] = {}
    overrides = []
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key in WORDS:
            own[key] = WORDS[key](key, value)
        else:
            overrides.append(word)
    if "pareto" not in own and (limits := [word for word in ("max_cost", "max_days") if word in own]):
        raise SearchError(f"{limits[0]}={own[limits[0]]:g} limits a front of time against cost: add pareto=time")
    if "validate" in own and (others := own.keys() - OF_VALIDATE):
        raise SearchError(
            f"validate={','.join(own['validate'])} searches nothing, so it does not take {', '.join(sorted(others))}, "
            "only calibrate=FILE, calibration=FILE and runs_dir=DIR"
        )
    if "pareto" in own and (others := own.keys() & NOT_OF_PARETO):
        raise SearchError(
            f"pareto={own['pareto']} shows every plan that no other one beats, on any number of nodes; it does not "
            f"take {', '.join(sorted(others))}"
        )
    return Asked(**own, overrides=tuple(overrides))


def _plans(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise SearchError(f"{key}={value} must be a number of plans, 1 or more")
    return int(value)


def _path(key: str, value: str) -> Path:
    if not value:
        raise SearchError(f"{key}= names no file; give the path of one")
    return Path(value)


def _runs(key: str, value: str) -> tuple[str, ...]:
    if not all(value.split(",")):
        raise SearchError(f"{key}={value}: give runs, joined by commas: their folders, names or job ids")
    return tuple(value.split(","))


def _name(key: str, value: str) -> str:
    if not value or not all(c.isascii() and (c.isalnum() or c in "_-") for c in value):
        raise SearchError(f"{key}={value!r} cannot name a configuration: use letters, digits, '_' and '-'")
    return value


def _flag(key: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise SearchError(f"{key}={value} must be true or false")
    return value == "true"


def _first(key: str, value: str) -> First:
    if value not in list(First):
        raise SearchError(f"{key}={value} must be time or cost: whether the fastest or the cheapest plan comes first")
    return First(value)


def _amount(key: str, value: str) -> float:
    try:
        amount = float(value)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise SearchError(f"{key}={value} must be a number above 0, such as {key}=1e3")
    return amount


WORDS: Mapping[str, Callable[[str, str], Any]] = {
    "top": _plans,
    "csv": _path,
    "page": _path,
    "plan": _name,
    "overwrite": _flag,
    "leave_out": _flag,
    "pareto": _first,
    "max_cost": _amount,
    "max_days": _amount,
    "tokens": _amount,
    "explain": _plans,
    "validate": _runs,
    "calibrate": _path,
    "calibration": _path,
}
"""By word, which is a field of `Asked`: its value, from word and text."""
