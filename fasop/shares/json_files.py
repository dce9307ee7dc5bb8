"""JSON files that other programs wrote: values with one message for what they should be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fasop.errors import SearchError
from megatron_ext.contract.files import read_regular_text, why

LARGEST = 1 << 40


def text_in(file: Path) -> str:
    """Raises SearchError where it cannot be read."""
    try:
        return read_regular_text(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise SearchError(f"{file}: cannot be read ({reason})") from error


def object_in(file: Path) -> dict[str, Any]:
    """Raises SearchError where it is not an object."""
    try:
        content = json.loads(text_in(file))
    except (ValueError, RecursionError) as error:
        raise SearchError(f"{file}: not JSON: {why(error)}") from error
    if not isinstance(content, dict):
        raise SearchError(f"{file}: must be a JSON object, {{…}}")
    return content


@contextmanager
def of_word(key: str, file: Path) -> Iterator[None]:
    """Errors about a file that a word of the command line names also name the word's key."""
    try:
        yield
    except SearchError as error:
        if str(error).startswith(f"{file}:"):
            raise SearchError(f"{key}={error}") from error
        raise


def there(file: Path, content: Mapping[str, Any], key: str, before: str = "") -> Any:
    """The value of a key that must be there."""
    if key not in content:
        raise SearchError(f"{file}: {before}{key} is missing")
    return content[key]


def number_in(file: Path, key: str, value: Any, above: float | None = None) -> float:
    """A number, or a text that is one."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not (0 <= number <= LARGEST) or (above is not None and number <= above):
        rule = "0 or more" if above is None else f"above {above:g}"
        raise SearchError(f"{file}: {key}={shown(value)} must be a number, {rule}")
    return number


def whole_in(file: Path, key: str, value: Any) -> int:
    number = number_in(file, key, value)
    if number != int(number) or number < 1:
        raise SearchError(f"{file}: {key}={shown(value)} must be a whole number, at least 1")
    return int(number)


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
