"""What the text of a value stands for, in the words and options of commands that Hydra does not read.

A `Reader` takes the text and raises `NoValue` with the rule that it breaks, which begins with a verb: "must be …". Who
knows where the text stood puts the key before it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from conf.errors import TdppError, reworded
from conf.reading.own_folders import is_file
from conf.utf8 import is_utf8, shown

MOST_DIGITS = 4000
"""The most digits of a number: Python reads none of more than 4300."""

T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)
Reader: TypeAlias = Callable[[str], T]


class NoValue(ValueError):
    """The rule that a text breaks."""


def read_by(reader: Reader[Any], default: Any = dataclasses.MISSING) -> Any:
    """A field of a dataclass of words `key=value`: how its value is read, and what it is without the word."""
    return dataclasses.field(default=default, metadata={"reader": reader})


def words_of(kind: Any) -> dict[str, Reader[Any]]:
    """How each word is read that is a field of such a dataclass."""
    return {one.name: one.metadata["reader"] for one in dataclasses.fields(kind) if "reader" in one.metadata}


def parse_key_values(
    words: Sequence[str], readers: Mapping[str, Reader[Any]], error: type[TdppError]
) -> tuple[dict[str, Any], list[str]]:
    """The values of words `key=value` whose key has a reader, and all other words.

    Of a word that comes twice the last one counts.

    Raises:
        error: a word has no such value.
    """
    own, others = {}, []
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in readers:
            own[key] = read(key, text, readers[key], error)
        else:
            others.append(word)
    return own, others


def read(key: str, text: str, reader: Reader[T], error: type[TdppError]) -> T:
    """The value of `key=text`. Raises error: there is none."""
    if not is_utf8(text):
        raise error(f"{key}={shown(text)}: not UTF-8; write it in UTF-8")
    try:
        return reader(text)
    except NoValue as rule:
        raise error(f"{key}={_shown(text)} {rule}") from rule


def prefix_path(text: str) -> Path:
    """With which the names of files begin; a folder alone is none."""
    if text.endswith("/") or Path(text).name in ("", ".."):
        raise NoValue(f"is a folder; add a name for the data, such as {Path(text) / 'data'}")
    return Path(text)


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise NoValue("must be true or false")
    return text.lower() == "true"


def above_0(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise NoValue("must be a number above 0")
    return number


def not_negative(text: str) -> float:
    if not 0 <= (number := _number(text)) < math.inf:
        raise NoValue("must be a number, at least 0")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole(text: str) -> int:
    digits = text.isascii() and text.isdecimal()
    if digits and len(text) > MOST_DIGITS:
        raise NoValue(f"must have at most {MOST_DIGITS} digits")
    if not (digits and int(text)):
        raise NoValue("must be a whole number, at least 1")
    return int(text)


def _is_from_0(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def from_0(text: str) -> int:
    if not _is_from_0(text):
        raise NoValue("must be a whole number, at least 0")
    return int(text)


def port(text: str) -> int:
    """0 stands for any free one."""
    if not (_is_from_0(text) and int(text) < 65536):
        raise NoValue("must be a port, from 0 to 65535")
    return int(text)


def path(text: str) -> Path:
    if not text:
        raise NoValue("is empty; give the path of a file")
    return Path(text)


def name_of(what: str) -> Reader[str]:
    """Names that tdpp makes a file of, in a folder of its own; or the path of a file that lies elsewhere."""

    def name(text: str) -> str:
        if not (is_file(text) or re.fullmatch(r"[A-Za-z0-9_-]+", text)):
            raise NoValue(
                f"cannot name a {what}: use letters, digits, '_' and '-', or the path of a file that ends with .yaml"
            )
        return text

    return name


def one_of(kind: type[Word]) -> Reader[Word]:
    def word(text: str) -> Word:
        if text not in list(kind):
            raise NoValue(f"must be one of {', '.join(kind)}")
        return kind(text)

    return word


def several(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Values joined by commas, in their order; one that comes twice counts once."""

    def values(text: str) -> tuple[T, ...]:
        with reworded(NoValue, "", "; separate several by commas", of=NoValue):
            return tuple(dict.fromkeys(reader(part.strip()) for part in text.split(",")))

    return values


def _shown(text: str) -> str:
    """Quoted where its ends would not be plain to see, or where it may be a path."""
    return text if re.fullmatch(r"[A-Za-z0-9_.,+-]+", text) else repr(text)
