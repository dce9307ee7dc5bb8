"""JSON as frozen dataclasses: types are those of the fields, ranges those in their annotations."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from conf.errors import RunFolderError
from megatron_ext.contract.plan_check import shown_json

T = TypeVar("T")
CLASS = "class"
"""The key of an object that says which of several dataclasses it is."""


class Rule(NamedTuple):
    """What a value of the right type may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("0 or more", lambda value: value >= 0)]
Unix = Annotated[float, Rule("seconds since 1970", lambda value: 0 <= value < 1e11)]
_SCALARS: dict[Any, Rule] = {
    bool: Rule("true or false", lambda value: isinstance(value, bool)),
    int: Rule("a whole number", lambda value: type(value) is int and abs(value) < 1 << 63),
    float: Rule("a number", lambda value: type(value) is float or (type(value) is int and abs(value) < 1 << 1000)),
    str: Rule("a string", lambda value: isinstance(value, str)),
}


def typed(kind: type[T], content: Any, where: str) -> T:
    """A JSON object as a dataclass. Keys that the class lacks are passed over; one with a default may be missing.

    Raises:
        RunFolderError: it does not fit; it names `where`, the key, its value and the rule.
    """
    try:
        return _object(kind, content, "")
    except _Unfit as error:
        raise RunFolderError(f"{where} is damaged{error}") from None


class _Unfit(Exception):
    pass


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type, and whether it has to be there."""
    hints = get_type_hints(kind, include_extras=True)
    needed = {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(kind)
    }
    return tuple((name, hints[name], must) for name, must in needed.items())


def _object(kind: type[T], content: Any, key: str) -> T:
    if not isinstance(content, dict):
        raise _Unfit(f": {key}={shown_json(content)} must be a JSON object" if key else ": it is not a JSON object")
    fields = _fields(kind)  # type: ignore[arg-type]
    if lacking := [name for name, _, must in fields if must and name not in content]:
        raise _Unfit(f", or of another version of tdpp: {key or 'it'} lacks {', '.join(lacking)}")
    found = {
        name: _value(hint, content[name], f"{key}.{name}" if key else name)
        for name, hint, _ in fields
        if name in content
    }
    try:
        return kind(**found)
    except ValueError as error:
        raise _Unfit(f": {error}") from None


def _value(hint: Any, value: Any, key: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = _value(inner[0], value, key)
        if not inner[1].holds(found):
            raise _unfit(key, value, inner[1].words)
        return found
    if origin in (Union, types.UnionType):
        return None if value is None and types.NoneType in inner else _value(_chosen(inner, value, key), value, key)
    if origin is tuple:
        if not isinstance(value, list):
            raise _unfit(key, value, "a list")
        return tuple(_value(inner[0], item, f"{key}[{number}]") for number, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _unfit(key, value, "a JSON object")
        return {name: _value(inner[1], item, f"{key}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, key)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Path | Enum):
        text = _value(str, value, key)
        if issubclass(hint, Enum) and text not in [one.value for one in hint]:
            raise _unfit(key, value, f"one of {', '.join(one.value for one in hint)}")
        return hint(text)
    if not _SCALARS[hint].holds(value):
        raise _unfit(key, value, _SCALARS[hint].words)
    return float(value) if hint is float else value


def _chosen(kinds: tuple[type, ...], value: Any, key: str) -> Any:
    """The one of several types that a value is of: the only one, or by its `CLASS`, or the one that is no dataclass."""
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if len(kinds) == 1:
        return kinds[0]
    name = value.get(CLASS) if isinstance(value, dict) else None
    for kind in kinds:
        if kind.__name__ == name if dataclasses.is_dataclass(kind) else name is None:
            return kind
    raise _unfit(key, value, f"one of {', '.join(kind.__name__ for kind in kinds)}")


def plain(value: Any) -> Any:
    """What `typed` reads again as the same dataclass: objects that name their class, lists, texts and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {CLASS: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def _unfit(key: str, value: Any, must: str) -> _Unfit:
    return _Unfit(f": {key}={shown_json(value)} must be {must}")
