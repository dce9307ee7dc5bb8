"""JSON as frozen dataclasses: types are those of the fields, ranges those in their annotations."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache, partial
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
    Raises RunFolderError: it does not fit; it names `where`, the key, its value and the rule."""
    if not isinstance(content, dict):
        raise RunFolderError(f"{where} is damaged: it is not a JSON object")
    try:
        found: T = _object(kind, content)
    except _Unfit as error:
        raise RunFolderError(f"{where} is damaged{error}") from None
    return found


class _Unfit(Exception):
    """What is wrong with a value; its key is put together on the way out, from the innermost part on."""

    def __init__(self, words: str, key: str = "") -> None:
        super().__init__(words)
        self.words, self.key = words, key

    def within(self, part: str) -> _Unfit:
        dot = "." if self.key and not self.key.startswith("[") else ""
        self.key = f"{part}{dot}{self.key}"
        return self

    def __str__(self) -> str:
        return self.words.format(key=self.key, it=self.key or "it")


def _unfit(value: Any, must: str) -> _Unfit:
    shown = f"{shown_json(value)} must be {must}".replace("{", "{{").replace("}", "}}")
    return _Unfit(": {key}=" + shown)


Read = Callable[[Any], Any]
"""Turns a JSON value into one of a certain type, or raises _Unfit."""


@cache
def _fields(kind: Any) -> tuple[dict[str, Read], dict[str, None]]:
    """How each field is read, by its name; and the names of those that have to be there."""
    hints, fields = get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
    without = dataclasses.MISSING
    needed = [one.name for one in fields if one.default is without and one.default_factory is without]
    return {one.name: _reader(hints[one.name]) for one in fields}, dict.fromkeys(needed)


def _object(kind: Any, content: Any) -> Any:
    if not isinstance(content, dict):
        raise _unfit(content, "a JSON object")
    fields, needed = _fields(kind)
    if not needed.keys() <= content.keys():
        lacking = ", ".join(name for name in needed if name not in content)
        raise _Unfit(f", or of another version of tdpp: {{it}} lacks {lacking}")
    found, name = {}, ""
    try:
        for name, value in content.items():
            if (read := fields.get(name)) is not None:
                found[name] = read(value)
    except _Unfit as error:
        raise error.within(name) from None
    try:
        return kind(**found)
    except ValueError as error:
        raise _Unfit(": " + str(error).replace("{", "{{").replace("}", "}}")) from None


def _reader(hint: Any) -> Read:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _ruled(_reader(inner[0]), inner[1])
    if origin in (Union, types.UnionType):
        kinds = {kind: _reader(kind) for kind in inner if kind is not types.NoneType}
        optional = len(kinds) < len(inner)
        only = next(iter(kinds.values())) if len(kinds) == 1 else None

        def either(value: Any) -> Any:
            if value is None and optional:
                return None
            return only(value) if only is not None else kinds[_chosen(kinds, value)](value)

        return either
    if origin is tuple:
        return _each(_reader(inner[0]))
    if origin in (dict, Mapping):
        return _by_name(_reader(inner[1]))
    if dataclasses.is_dataclass(hint):
        return partial(_object, hint)
    if isinstance(hint, type) and issubclass(hint, Path | Enum):
        return _named(hint)
    if hint is Any:
        return lambda value: value
    words, holds = _SCALARS[hint]
    convert = float if hint is float else None

    def scalar(value: Any) -> Any:
        if type(value) is hint and hint is not int:  # most values: any text, any number with a point
            return value
        if not holds(value):
            raise _unfit(value, words)
        return value if convert is None else convert(value)

    return scalar


def _ruled(read: Read, rule: Rule) -> Read:
    words, holds = rule

    def ruled(value: Any) -> Any:
        found = read(value)
        if not holds(found):
            raise _unfit(value, words)
        return found

    return ruled


def _each(read: Read) -> Read:
    def each(value: Any) -> Any:
        if not isinstance(value, list):
            raise _unfit(value, "a list")
        found = []
        try:
            for item in value:
                found.append(read(item))
        except _Unfit as error:
            raise error.within(f"[{len(found)}]") from None
        return tuple(found)

    return each


def _by_name(read: Read) -> Read:
    def by_name(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unfit(value, "a JSON object")
        found, name = {}, ""
        try:
            for name, item in value.items():
                found[name] = read(item)
        except _Unfit as error:
            raise error.within(name) from None
        return found

    return by_name


def _named(hint: Any) -> Read:
    text, known = _reader(str), [one.value for one in hint] if issubclass(hint, Enum) else None

    def named(value: Any) -> Any:
        if text(value) not in (known or [value]):
            raise _unfit(value, f"one of {', '.join(known or ())}")
        return hint(value)

    return named


def _chosen(kinds: Collection[type], value: Any) -> Any:
    """The one of several types that a value is of: by its `CLASS`, or the one that is no dataclass."""
    name = value.get(CLASS) if isinstance(value, dict) else None
    for kind in kinds:
        if kind.__name__ == name if dataclasses.is_dataclass(kind) else name is None:
            return kind
    raise _unfit(value, f"one of {', '.join(str(kind.__name__) for kind in kinds)}")


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
