"""What plan.json must hold (docs/formats.md): its keys, and the type and range of each value.

The keys and their types are those of the dataclasses of `megatron_ext.contract.plan` and `plan_parts`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import MISSING
from functools import lru_cache
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.goal import Best, Target
from megatron_ext.contract.keys import Range, Word, left_out, ranges_of
from megatron_ext.contract.models.keys import DEFAULT, DEPTHS
from megatron_ext.contract.models.model import ModelConfig, family_names, sizes_lacked
from megatron_ext.contract.parallel_config import Recompute

_SHOWN = 80
"""Characters of a value in a message."""


class PlanFault(EngineError):
    """A key of the plan, its value and the rule that it breaks."""


class Allowed(NamedTuple):
    """What a value may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _one_of(names: Iterable[str]) -> Allowed:
    names = tuple(names)
    return Allowed(f"one of {', '.join(names)}", lambda value: value in names)


def _parsed_by(parse: Callable[[str], object]) -> Allowed:
    def holds(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    try:
        parse("")
    except ValueError as rule:
        return Allowed(str(rule), holds)
    raise AssertionError("an empty text is not allowed")


_FILE_NAME = Allowed("a file's name", lambda name: name not in ("", ".", "..") and not re.search(r"[/\0]", name))
_TEXTS: Dict[str, Allowed] = {
    "schedule_file": _FILE_NAME,
    "recompute": _parsed_by(Recompute),
    "nodes.name": _FILE_NAME,
    "model.family": _one_of(family_names()),
    "model.depths": Allowed("numbers of blocks, such as 3-4-6-3", lambda text: bool(re.fullmatch(DEPTHS, text))),
    "train.until": _parsed_by(Target.parse),
    "train.best": _parsed_by(Best.parse),
    "device": _one_of(("cpu", "cuda")),
    "rehearsal.clock": _one_of(("virtual", "anchored")),
}
"""What a text may be by its key, without the places in lists."""


def check_object(kind: Any, value: Any, key: str, whole: bool) -> None:
    """Checks a JSON object against a dataclass; with `whole` it has every key and no other. Raises PlanFault: it does
    not fit."""
    if not isinstance(value, dict):
        raise fault(key or "the plan", value, "a JSON object")
    hints = _hints(kind)
    for name in value if whole else ():
        if name not in hints:
            from difflib import get_close_matches

            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(hints)}"
            raise PlanFault(f"{_joined(key, name)}={shown_json(value[name])} is not a key of a plan; {meant}")
    if whole:
        without = sizes_lacked(str(value.get("family", DEFAULT))) if kind is ModelConfig else ()
        require(value, (name for name in hints if name not in left_out(kind) and name not in without), key)
    ranges = ranges_of(kind)
    for name, hint in hints.items():
        if name in value:
            _check(hint, value[name], _joined(key, name), whole, ranges.get(name))


def require(value: Mapping[str, Any], keys: Iterable[str], key: str) -> None:
    """Raises PlanFault if the object under `key` lacks one of `keys`."""
    for name in keys:
        if name not in value:
            raise PlanFault(f"{_joined(key, name)} is missing")


@lru_cache(maxsize=None)
def _hints(kind: Any) -> Dict[str, Any]:
    return get_type_hints(kind)


def _check(hint: Any, value: Any, key: str, whole: bool, within: Optional[Range]) -> None:
    """Checks a value against its type, and each number in it against a range."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Union:  # Optional
        if value is not None:
            _check(inner[0], value, key, whole, within)
    elif dataclasses.is_dataclass(hint):
        check_object(hint, value, key, whole)
    elif origin is list:
        if not isinstance(value, list):
            raise fault(key, value, "a list")
        for number, item in enumerate(value):
            _check(inner[0], item, f"{key}[{number}]", whole, within)
    elif origin is dict:
        if not isinstance(value, dict):
            raise fault(key, value, "a JSON object")
        for name, item in value.items():
            _check(inner[1], item, _joined(key, name), whole, within)
    else:
        words = isinstance(hint, type) and issubclass(hint, Word)
        rules = [
            _SCALARS[str if words or hint is Recompute else hint],
            _one_of(hint) if words else _TEXTS.get(re.sub(r"\[\d+\]", "", key)),
            None if within is None else Allowed(within.in_plan, within.holds_in_plan),
        ]
        for allowed in rules:
            # Whoever shows a plan shows any name; a rank names files by it.
            if allowed is not None and (whole or allowed is not _FILE_NAME) and not allowed.holds(value):
                raise fault(key, value, allowed.words)


_ANY = (bool, int, float, str, type(None))
_SCALARS: Dict[Any, Allowed] = {
    bool: Allowed("true or false", lambda value: isinstance(value, bool)),
    int: Allowed("a whole number", lambda value: type(value) is int and abs(value) < 2**63),
    float: Allowed("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300),  # nor is NaN
    str: Allowed("a text", lambda value: isinstance(value, str)),
    object: Allowed(
        "a number, a text, true, false, null or a list of these",
        lambda value: all(isinstance(one, _ANY) for one in (value if isinstance(value, list) else [value])),
    ),
}


def build(hint: Any, value: Any) -> Any:
    """What was checked, as the dataclasses that it describes; what a plan of another version lacks is empty,
    or has its default."""
    origin, inner = get_origin(hint), get_args(hint)
    if value is not None and origin is Union:
        return build(inner[0], value)
    if origin is list:
        return [build(inner[0], item) for item in value]
    if dataclasses.is_dataclass(hint):
        hints = _hints(hint)  # type: ignore[arg-type]
        return hint(  # type: ignore[operator]
            **{
                field.name: build(hints[field.name], value[field.name])
                if field.name in value
                else _absent(field.name, hints[field.name])
                for field in dataclasses.fields(hint)
                if field.name in value or field.default is MISSING or field.name not in left_out(hint)
            }
        )
    if hint is Recompute:
        return Recompute(value)
    known = isinstance(hint, type) and issubclass(hint, Word) and value in tuple(hint)  # a log may not say
    return hint(value) if known else value


_BEFORE = {"chunks": 1, "recompute": Recompute.none, "precision": "fp32"}
"""What runs did before there was a key for it."""


def _absent(name: str, hint: Any) -> Any:
    if name in _BEFORE or get_origin(hint) is Union:
        return _BEFORE.get(name)
    if isinstance(hint, type) and issubclass(hint, Word):
        return next(iter(hint))
    return build(hint, {}) if dataclasses.is_dataclass(hint) else (get_origin(hint) or hint)()


def fault(key: str, value: Any, must: str) -> PlanFault:
    """`must` is what the value must be."""
    return PlanFault(f"{key}={shown_json(value)} must be {must}")


def shown_json(value: Any) -> str:
    """A value as a message shows it: JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


Values = Mapping[str, Any]
Faults = Iterator[Union[PlanFault, Tuple[str, Any, str]]]
"""Each is a rule that is broken; in short, a key, its value and what this must be."""
Rules = List[Tuple[Tuple[str, ...], Callable[[Values], Faults]]]
"""Rules with the keys that they need."""
GRID = ("tensor", "data", "pipeline")
"""The keys of a layout in which all stages are alike."""
