"""The last iterations that a run has logged, read from the end of its log."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import RunFolderError
from conf.log_lines import IterationLine, iteration_line

TAIL_BYTES = 64 * 1024
"""Of metrics.jsonl some 200 logged iterations, of Megatron-LM's log with its timers some 30: enough for the pace."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A logged iteration. `elapsed_ms` is the mean per iteration since the one logged before."""

    iteration: int
    unix: float
    elapsed_ms: float
    loss: float | None
    """None where all iterations since the line before were skipped, and in a rehearsal."""
    nan: int


def read_log(path: Path) -> tuple[Iteration, ...]:
    """The last lines of metrics.jsonl."""
    try:
        return tuple(_iteration(json.loads(line)) for line in _last_lines(path))
    except (ValueError, KeyError) as error:
        raise RunFolderError(f"{path} holds a line that is no logged iteration: {error}") from error


def read_text_log(path: Path) -> tuple[Iteration, ...]:
    """The last iterations in what Megatron-LM's last rank printed.

    Their time is that of the last writing: the time in the lines is a container's, of an unknown zone.
    """
    logged = [found for line in _last_lines(path) if (found := iteration_line(line)) is not None]
    unix = path.stat().st_mtime if logged else 0.0
    return tuple(
        Iteration(iteration=one.iteration, unix=unix, elapsed_ms=one.elapsed_ms, loss=_trained(one), nan=one.nan)
        for one in logged
    )


def _trained(line: IterationLine) -> float | None:
    """The loss of a line; Megatron-LM leaves it out where it is no number, and where everything was skipped."""
    return None if math.isnan(line.loss) and line.skipped and not line.nan else line.loss


def _last_lines(path: Path) -> list[str]:
    """Whole lines from the end of a file that may not be there yet; one that is still being written is left out."""
    return tail(path, TAIL_BYTES).split("\n")[:-1]


def tail(path: Path, size: int, begin: int = 0) -> str:
    """The end of a file that may not be there yet, from the begin of a line; nothing of what comes before `begin`."""
    try:
        with path.open("rb") as file:
            start = max(begin, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return text.partition("\n")[2] if start > begin else text


def _iteration(content: Any) -> Iteration:
    return Iteration(**{name: content[name] for name in Iteration.__dataclass_fields__})
