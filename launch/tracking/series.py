"""From the lines of metrics.jsonl, as it grows and is cut back, to points of series under the names people look for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.run_folder.iteration_time import Spent
from conf.visible import nearest
from launch.errors import LaunchError

NAMES = {
    "loss": "train/loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "loss_scale": "loss_scale",
    "elapsed_ms": "iteration_ms",
    "tokens_per_s": "throughput/tokens_per_s",
    "samples_per_s": "throughput/samples_per_s",
    "tflops_per_rank": "throughput/tflops_per_rank",
    "consumed_samples": "samples",
    "epoch": "epoch",
    "skipped": "train/skipped",
    "nan": "train/nan",
    "evaluation_s": "valid/seconds",
    "cost": "cost",
    "global_batch_size": "global_batch_size",
}
"""The names of the keys of metrics.jsonl. Others are a task's own metrics: train/<name>, or valid/<name>."""
OF_TASKS = ("train/", "valid/")
"""What the names of a task's own metrics begin with."""
_EVALUATED = "valid_"
_NO_SERIES = ("iteration", "unix")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What turns the samples and hours of a run into tokens and dollars."""

    tokens_per_sample: int
    """0 where samples have no fixed number of tokens."""
    price_per_hour: float | None
    """The dollars of all nodes; None where that is not known."""
    log_interval: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is known of one iteration."""

    iteration: int
    unix: float
    """When it was logged."""
    values: Mapping[str, float]
    """The values by the name of the series; all are finite."""


class Points:
    """Makes them of a run's lines, from the first one on."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._spent = Spent(scale.log_interval)

    def of(self, line: Mapping[str, Any]) -> Point:
        """Returns the point of the next line."""
        iteration = line["iteration"]
        hours = self._spent.add(iteration, line.get("elapsed_ms") or 0.0, line.get("evaluation_s") or 0.0)
        values = {_name(key): float(value) for key, value in line.items() if _is_finite(key, value)}
        if self._scale.tokens_per_sample and "samples" in values:
            values["tokens"] = values["samples"] * self._scale.tokens_per_sample
        if self._scale.price_per_hour is not None:
            values.setdefault("cost", hours * self._scale.price_per_hour)
        return Point(iteration=iteration, unix=float(line.get("unix") or 0.0), values=values)


def require_known(series: str) -> None:
    """Raises LaunchError for a name that no series has."""
    names = [*dict.fromkeys((*NAMES.values(), "tokens"))]
    if series not in names and not series.startswith(OF_TASKS):
        raise LaunchError(
            f"sweep_metric={series}: no run logs that; {nearest(series, [*names, 'valid/loss'])}valid series are "
            f"valid/METRIC, train/METRIC, {', '.join(names)}"
        )


def _name(key: str) -> str:
    if key in NAMES:
        return NAMES[key]
    return f"valid/{key.removeprefix(_EVALUATED)}" if key.startswith(_EVALUATED) else f"train/{key}"


def _is_finite(key: str, value: Any) -> bool:
    return key not in _NO_SERIES and isinstance(value, (int, float)) and math.isfinite(value)


class MetricsFile:
    """Reads each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._last = -1

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines since the last call, and whether the file has been cut back since: then they are all of its lines.

        What is not a metrics line, or not whole yet, is left out.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                known = (status.st_dev, status.st_ino)
                cut = self._file is not None and (known != self._file or status.st_size < self._offset)
                if cut:
                    self._offset, self._last = 0, -1
                self._file = known
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in map(_parsed, whole.splitlines()):
            if line is not None and line["iteration"] > self._last:
                self._last = line["iteration"]
                found.append(line)
        return found, cut


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and type(line.get("iteration")) is int else None
