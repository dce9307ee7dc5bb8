"""The lines of `metrics.jsonl`, and of them a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from conf.errors import RunFolderError
from conf.run_folder.run_files import parse_json

_COUNTED = ("elapsed_ms", "consumed_samples")
"""What iterations are timed and placed by, so that it must be finite. A loss may be infinite."""
_MOST = 5
"""So many lines that are none, and keys that hold something else than numbers, are named."""


def metrics_lines(texts: Iterable[str], file: str, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The numbers of each line by key, null among them, by iteration; of an iteration that was run twice, the later.

    Args:
        file: its name, for the notes, which get what is left out.
    """
    lines, strange = dict[int, Mapping[str, Any]](), 0
    others: dict[str, list[int]] = {}
    for number, text in enumerate(texts, 1):
        line = _line(text)
        if line is None:
            strange += 1
            if strange <= _MOST:
                notes.append(f"{file}: line {number} is not a metrics line: {text[:80]!r}; ignored")
            continue
        for key in [key for key, value in line.items() if not _is_number(value, finite=key in _COUNTED)]:
            others.setdefault(key, []).append(number)
            del line[key]
        lines[line["iteration"]] = line
    if strange > _MOST:
        notes.append(f"{file}: {strange - _MOST} other lines are not metrics lines; ignored")
    for key, where in [*others.items()][:_MOST]:
        also = f" and {len(where) - 1} more" if len(where) > 1 else ""
        wanted = "a finite number" if key in _COUNTED else "a number"
        notes.append(f"{file}: {key[:80]!r} is not {wanted} in line {where[0]}{also}; left out there")
    if len(others) > _MOST:
        notes.append(f"{file}: {len(others) - _MOST} more keys are not always numbers; left out where they are not")
    return tuple(lines[iteration] for iteration in sorted(lines))


def _line(text: str) -> dict[str, Any] | None:
    """A JSON object of an iteration; None for anything else."""
    try:
        line = parse_json(text, "")
    except RunFolderError:
        return None
    iteration = line.get("iteration") if isinstance(line, dict) else None
    return line if type(iteration) is int and 0 <= iteration < 1 << 31 else None


def _is_number(value: Any, finite: bool) -> bool:
    """Or null."""
    return value is None or (
        (isinstance(value, float) or type(value) is int) and (not finite or abs(value) <= sys.float_info.max)
    )


def metrics_frame(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Logged lines as a table: integers where a key has no others, else floating-point numbers."""
    keys = dict.fromkeys(["iteration", *(key for line in lines for key in line)])
    return pd.DataFrame({key: _column([line.get(key) for line in lines]) for key in keys})


def _column(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    if all(isinstance(value, int) and abs(value) < 1 << 63 for value in known):
        return pd.array(values, dtype="int64" if known and len(known) == len(values) else "Int64")
    return np.array([math.nan if value is None else _as_float(value) for value in values])


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if value > 0 else -math.inf
