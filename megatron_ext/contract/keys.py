"""How a key of a configuration is declared: its default, the numbers or words it takes, and when plan.json has it.

The largest numbers are far beyond what anybody runs, and small enough that every rule, message and file that follows
takes no more than seconds and megabytes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any, Callable, Dict, Mapping, Optional

_ENDLESS = 1e6
"""From here on a reader need not know where a range ends."""


Get = Callable[[str, Any], Any]
"""Gives the value of a key, or the second argument where there is none: rules look so at both a user's configuration
and the JSON of a plan."""


class Word(str, Enum):
    """A closed set of words. A member equals its text, prints as its text, and is written to JSON as its text."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; both are allowed, unless `above` or `below` says otherwise."""

    low: float
    high: float
    above: bool = False
    """Whether numbers must be above `low`."""
    below: bool = False
    """Whether numbers must be below `high`."""
    ends_matter: bool = False
    """Whether a message names both ends, whichever is broken."""

    def __str__(self) -> str:
        """The range as docs/reference.md shows it."""
        least = f"above {_plain(self.low)}" if self.above else f"{_plain(self.low)} or more"
        if self.below:
            return f"{least}, below {_plain(self.high)}"
        if self.high >= _ENDLESS:
            return least
        return f"{least}, up to {_plain(self.high)}" if self.above else f"{_plain(self.low)} to {_plain(self.high)}"

    def broken_by(self, value: float) -> str:
        """What a user's value must be where it lies outside, such as `at least 1`; empty where it lies inside."""
        over_low = value > self.low if self.above else value >= self.low
        if over_low and (value < self.high if self.below else value <= self.high):
            return ""
        low, high = _plain(self.low), _plain(self.high)
        if self.ends_matter:
            return f"between {low} and {high}"
        if self.below:
            return f"above {low} and below {high}" if self.above else f"at least {low} and less than {high}"
        if isinstance(self.low, float) and not (over_low and math.isfinite(value)):
            return f"a number above {low}" if self.above else f"a number, at least {low}"
        return f"at most {high}" if over_low else f"at least {low}"

    @property
    def in_plan(self) -> str:
        """What a value of plan.json must be; the upper end counts only where it is a rule rather than a precaution."""
        if self.below:
            return f"{'above' if self.above else 'at least'} {_plain(self.low)} and below {_plain(self.high)}"
        if self.ends_matter:
            return f"from {_plain(self.low)} to {_plain(self.high)}"
        return f"{'above' if self.above else 'at least'} {_plain(self.low)}"

    def holds_in_plan(self, value: float) -> bool:
        """Whether a value of plan.json is what `in_plan` says."""
        over_low = value > self.low if self.above else value >= self.low
        if self.below:
            return over_low and value < self.high
        return over_low and (value <= self.high or not self.ends_matter)


COUNT = Range(1, 10**9)
NOT_NEGATIVE = Range(0, 10**9)
FRACTION = Range(0.0, 1.0, below=True)
"""0 or any number above it that is below 1."""
PART = Range(0.0, 1.0, above=True, below=True)
"""A part of something: neither nothing nor all of it."""


def positive(high: float = 1e9) -> Range:
    """Any number above 0, up to `high`."""
    return Range(0.0, high, above=True)


def from_0(high: float = 1e9) -> Range:
    """0 or any number above it, up to `high`."""
    return Range(0.0, high)


def between(low: float, high: float) -> Range:
    """The numbers between two ends that are both of interest to a user."""
    return Range(low, high, ends_matter=True)


def about(within: Optional[Range] = None, written: Optional[bool] = None) -> Mapping[str, Any]:
    """The metadata of a field of a dataclass that is a key of a configuration or of plan.json.

    Args:
        within: the range of a number, or of the numbers in a list.
        written: whether plan.json always has the key; by default where it has no default. Otherwise plan.json lacks it
            while it has its default, or null where it has none.
    """
    return {"within": within, "written": written}


def option(default: Any, within: Optional[Range] = None, written: Optional[bool] = None) -> Any:
    """A field with a default (`list`: an empty list) and what `about` says of it."""
    metadata = about(within, written)
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _declared(kind: Any, name: str, about: str) -> Any:
    """What the first class that says so says of a field: a subclass need not repeat it, and neither need a part of
    plan.json repeat what the class in its `user_keys` says of the key that a user gives."""
    for cls in (*kind.__mro__, *getattr(kind, "user_keys", object).__mro__):
        found = vars(cls).get("__dataclass_fields__", {}).get(name)
        if found is not None and found.metadata.get(about) is not None:
            return found.metadata[about]
    return None


_RANGES: Dict[Any, Dict[str, Range]] = {}
_LEFT_OUT: Dict[Any, Dict[str, Any]] = {}


def ranges_of(kind: Any) -> Mapping[str, Range]:
    """The ranges of a class's keys, of those that have one."""
    if kind not in _RANGES:
        found = {field.name: _declared(kind, field.name, "within") for field in dataclasses.fields(kind)}
        _RANGES[kind] = {name: within for name, within in found.items() if within is not None}
    return _RANGES[kind]


def left_out(kind: Any) -> Mapping[str, Any]:
    """The keys that plan.json may lack, and the values with which it lacks them."""
    if kind not in _LEFT_OUT:
        found = _LEFT_OUT[kind] = {}
        for field in dataclasses.fields(kind):
            written = _declared(kind, field.name, "written")
            if not (field.default is MISSING if written is None else written):
                found[field.name] = None if field.default is MISSING else field.default
    return _LEFT_OUT[kind]


def shown(value: object) -> str:
    """A value as users write it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
