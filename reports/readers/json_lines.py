"""Lines of metrics.jsonl, experts.jsonl and decisions.jsonl (docs/formats.md)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from conf.run_folder.run_files import parse_json

if TYPE_CHECKING:
    import pandas as pd

_MOST = 5
"""So many lines that are none are named."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One about the batch; those that change nothing are there, too."""

    iteration: Count
    """After which it was made."""
    consumed_samples: Count
    before: Count
    """The global batch, in samples."""
    global_batch_size: Count
    """The next one."""
    shares_before: tuple[Count, ...]
    shares: tuple[Count, ...]
    learning_rate_factor: float
    reason: str
    similarity: float | None = None
    noise_scale: float | None = None
    """In samples."""
    micro_batch_sizes_before: tuple[Count, ...] = ()
    """Samples by replica; empty in runs of earlier versions, where all are alike."""
    micro_batch_sizes: tuple[Count, ...] = ()
    streams_before: tuple[Count, ...] = ()
    """Streams by replica; empty in runs of earlier versions, where they stay."""
    streams: tuple[Count, ...] = ()

    @property
    def resizes(self) -> bool:
        """Whether micro-batches have other sizes afterwards."""
        return self.micro_batch_sizes_before != self.micro_batch_sizes

    @property
    def changes_streams(self) -> bool:
        """Whether replicas run other numbers of copies of the model afterwards."""
        return self.streams_before != self.streams

    @property
    def changes(self) -> bool:
        """Whether anything is another afterwards."""
        return (self.before, self.shares_before) != (self.global_batch_size, self.shares) or (
            self.resizes or self.changes_streams
        )


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """A start of an elastic run with another plan."""

    iteration: Count
    """The iteration of the checkpoint that it goes on from; 0 without one."""
    start: str
    nodes_before: tuple[str, ...]
    nodes: tuple[str, ...]
    shares_before: tuple[Count, ...]
    shares: tuple[Count, ...]
    reason: str


def decisions(lines: Iterable[str], notes: list[str]) -> tuple[Decision | Regrouping, ...]:
    """In their order; lines that are none become notes."""
    found: list[Decision | Regrouping] = []
    strange = 0
    for number, line in enumerate(lines, 1):
        name = f"decisions.jsonl: line {number}"
        try:
            content = parse_json(line, name)
            moves = isinstance(content, dict) and "nodes" in content
            found.append(typed(Regrouping, content, name) if moves else typed(Decision, content, name))
        except RunFolderError as error:
            strange += 1
            if strange <= _MOST:
                notes.append(f"{error}; ignored")
    if strange > _MOST:
        notes.append(f"decisions.jsonl: {strange - _MOST} other lines are not decisions; ignored")
    return tuple(found)


def expert_loads(texts: Iterable[str], file: str, notes: list[str]) -> Mapping[int, Sequence[Sequence[float]]]:
    """[layers][experts] by iteration, of an iteration that was run twice the later; `notes` get what is left out."""
    found: dict[int, Sequence[Sequence[float]]] = {}
    strange = []
    for number, text in enumerate(texts, 1):
        line = _line(text)
        rows: Any = line.get("loads") if line else None
        if (
            line is not None
            and isinstance(rows, list)
            and rows
            and all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows)
            and all(value is not None and _is_number(value, finite=True) for row in rows for value in row)
        ):
            found[line["iteration"]] = rows
        else:
            strange.append(number)
    if strange:
        also = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        notes.append(f"{file}: line {strange[0]}{also} has no table of experts; ignored")
    return {iteration: found[iteration] for iteration in sorted(found)}


_COUNTED = ("elapsed_ms", "consumed_samples")
"""What iterations are timed and placed by, so that it must be finite. A loss may be infinite."""


def metrics_lines(texts: Iterable[str], file: str, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """The numbers of each line by key, null among them, by iteration; of an iteration that was run twice, the later.
    `file`: its name, for the notes, which get what is left out."""
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
    """Says whether a value is a number or null."""
    return value is None or (
        (isinstance(value, float) or type(value) is int) and (not finite or abs(value) <= sys.float_info.max)
    )


def metrics_frame(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Logged lines as a table: integers where a key has no others, else floating-point numbers."""
    import pandas as pd  # which `tdpp simulate`, reading decisions alone, does without

    keys = dict.fromkeys(["iteration", *(key for line in lines for key in line)])
    return pd.DataFrame({key: _column([line.get(key) for line in lines]) for key in keys})


def _column(values: Sequence[float | None]) -> Any:
    import pandas as pd

    known = [value for value in values if value is not None]
    if all(isinstance(value, int) and abs(value) < 1 << 63 for value in known):
        return pd.array(values, dtype="int64" if known and len(known) == len(values) else "Int64")
    return pd.array([math.nan if value is None else _as_float(value) for value in values], dtype="float64")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if value > 0 else -math.inf
