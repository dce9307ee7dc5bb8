"""A frozen object with other values is what `dataclasses.replace` makes of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import pytest

from fasop.frozen import replace


@dataclass(frozen=True, kw_only=True)
class _Pair:
    low: int
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.low} > {self.high}")

    @cached_property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class _Counted:
    name: str
    seen: list[str] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class _Slotted:
    low: int
    high: int = 9


def test_it_equals_what_python_makes() -> None:
    one = _Pair(low=1)
    assert one.mean == 5
    made = replace(one, low=3)
    assert made == dataclasses.replace(one, low=3) == _Pair(low=3)
    assert made.mean == 6, "what was worked out of the first one's values is not kept"
    assert one.low == 1


def test_its_checks_are_made() -> None:
    with pytest.raises(ValueError, match="10 > 9"):
        replace(_Pair(low=1), low=10)


def test_it_stays_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(_Pair(low=1), low=2).low = 3  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="middle"):
        replace(_Pair(low=1), middle=2)  # type: ignore[call-arg]


def test_what_is_no_argument_is_made_anew() -> None:
    one = _Counted("a")
    one.seen.append("x")
    assert replace(one).seen == replace(one, name="b").seen == []


def test_objects_without_a_dictionary_are_made_by_python() -> None:
    assert replace(_Slotted(1), high=3) == _Slotted(1, 3)
