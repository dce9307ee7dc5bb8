"""One encoding everywhere: a run's files name paths, and processes on other machines, in other locales, open them."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VARIABLE = "PYTHONUTF8"
_PRINTED = "PYTHONIOENCODING"
AS_BYTES = "tdpp.as_bytes"
r"""How a stream prints what its encoding lacks (`errors=`): `\xff` for a byte of a name that is not UTF-8."""


def uses_utf8() -> bool:
    """Whether Python reads names of files as UTF-8."""
    return sys.getfilesystemencoding().lower() in ("utf-8", "utf8")


def enter_utf8_mode(*, terminal: bool = False) -> None:
    """Starts this program again in Python's UTF-8 mode where the locale has another encoding: names would become other
    names in files that are UTF-8. Programs that it starts inherit the mode. What it prints is UTF-8 too, but on a
    `terminal`, which shows what the locale says."""
    os.environ[VARIABLE] = "1"
    if not uses_utf8():
        if terminal:
            os.environ.setdefault(_PRINTED, sys.stdout.encoding)
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    os.environ.pop(_PRINTED, None)
    for stream in () if terminal else (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=AS_BYTES)


def is_utf8(text: str) -> bool:
    """Not of a name whose bytes are not UTF-8: Python keeps them as surrogates, which no file can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def shown(text: str) -> str:
    r"""With `\xf6` for a byte that is not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace") if _of_bytes(text) else repr(text)


def _as_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    as_bytes = (shown(letter) if _is_byte(letter) else ascii(letter)[1:-1] for letter in letters)
    return "".join(as_bytes), error.end


codecs.register_error(AS_BYTES, _as_bytes)


def _is_byte(letter: str) -> bool:
    return "\udc80" <= letter <= "\udcff"


def _of_bytes(text: str) -> bool:
    return all(not "\ud800" <= letter <= "\udfff" or _is_byte(letter) for letter in text)


def require_utf8(config: DataclassInstance, folder: Path) -> None:
    """Raises ConfigError for a text of a configuration that no file can hold, or for a working folder whose name is
    such a text."""
    for key, text in _texts("", asdict(config)):
        if not is_utf8(text):
            raise ConfigError(f"{key}={shown(text)}: not UTF-8, so no file of the run could name it; rename it")
    if not is_utf8(str(folder)):
        raise ConfigError(
            f"the working folder {shown(str(folder))} is not UTF-8, so no file of the run could name it; rename it, or "
            f"work in another one"
        )


def _texts(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        parts = [(f"{key}.{name}" if key else str(name), part) for name, part in value.items()]
        return [(key, str(name)) for name in value] + [found for part in parts for found in _texts(*part)]
    if isinstance(value, list | tuple):
        return [found for number, part in enumerate(value) for found in _texts(f"{key}[{number}]", part)]
    return [(key, value)] if isinstance(value, str) else []
