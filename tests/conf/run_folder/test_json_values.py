"""JSON becomes a dataclass where it fits, and else one message that names the key, its value and the rule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, Unix, typed


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    on: bool = False


@dataclass(frozen=True, kw_only=True)
class Whole:
    count: Count
    at: Unix | None
    parts: tuple[Part, ...] = ()
    by_name: dict[str, float] | None = None


def test_what_fits_is_there_with_its_types_and_unknown_keys_are_passed_over() -> None:
    content = {"count": 3, "at": 5, "parts": [{"name": "a", "new": 1}], "by_name": {"x": 1}, "later": None}
    found = typed(Whole, content, "x.json")
    assert found == Whole(count=3, at=5.0, parts=(Part(name="a"),), by_name={"x": 1.0})
    assert type(found.at) is float
    assert typed(Whole, {"count": 0, "at": None}, "x.json") == Whole(count=0, at=None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "x.json is damaged: it is not a JSON object"),
        ({"at": 1}, "x.json is damaged, or of another version of tdpp: it lacks count"),
        ({"count": True, "at": 1}, "x.json is damaged: count=true must be a whole number"),
        ({"count": 1.0, "at": 1}, "x.json is damaged: count=1.0 must be a whole number"),
        ({"count": -1, "at": 1}, "x.json is damaged: count=-1 must be 0 or more"),
        ({"count": 10**20, "at": 1}, f"x.json is damaged: count={10**20} must be a whole number"),
        ({"count": None, "at": 1}, "x.json is damaged: count=null must be a whole number"),
        ({"count": 1, "at": "1"}, 'x.json is damaged: at="1" must be a number'),
        ({"count": 1, "at": float("nan")}, "x.json is damaged: at=NaN must be seconds since 1970"),
        ({"count": 1, "at": 1e300}, "x.json is damaged: at=1e+300 must be seconds since 1970"),
        ({"count": 1, "at": 1, "parts": {}}, "x.json is damaged: parts={} must be a list"),
        ({"count": 1, "at": 1, "parts": ["a"]}, 'x.json is damaged: parts[0]="a" must be a JSON object'),
        (
            {"count": 1, "at": 1, "parts": [{"name": "a"}, {}]},
            "x.json is damaged, or of another version of tdpp: parts[1] lacks name",
        ),
        ({"count": 1, "at": 1, "by_name": {"a": []}}, "x.json is damaged: by_name.a=[] must be a number"),
    ],
    ids=json.dumps,
)
def test_what_does_not_fit_is_named(content: Any, why: str) -> None:
    with pytest.raises(RunFolderError) as error:
        typed(Whole, content, "x.json")
    assert str(error.value) == why
