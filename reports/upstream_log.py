"""What Megatron-LM (`engine=megatron_lm`) says of a run in its logs: iterations, timers, memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from conf.log_lines import iteration_line

_TIMER = re.compile(r" {4}(\S.*?) \.*: \(([0-9.]+), ([0-9.]+)\)")
_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([0-9.]+) \| max allocated: ([0-9.]+) \| "
    r"reserved: ([0-9.]+) \| max reserved: ([0-9.]+)"
)


@dataclass(frozen=True)
class Memory:
    """Of a rank's allocator, MiB."""

    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class UpstreamLog:
    metrics: tuple[Mapping[str, Any], ...]
    """As lines of metrics.jsonl, by iteration; of an iteration that was run twice, the later line."""
    timers: Mapping[str, tuple[float, float]]
    """Least and largest time of all ranks in ms, medians of what was logged; the first block, which warms up, only
    if it is alone."""
    memory: Mapping[int, Memory]
    """By rank, what it told last; Megatron-LM asks one replica only."""


def parse(lines: Iterable[str], tokens_per_iteration: int) -> UpstreamLog:
    """Reads the lines of all nodes' logs, node after node; whatever else is in them is passed over.

    Timers count from the first logged iteration on: before it they are those of the set-up.
    """
    metrics: dict[int, Mapping[str, Any]] = {}
    timers: dict[str, list[tuple[float, float]]] = {}
    memory: dict[int, Memory] = {}
    for line in lines:
        if (told := iteration_line(line)) is not None:
            known = {key: value for key, value in asdict(told).items() if value is not None}
            metrics[told.iteration] = known | {"tokens_per_s": tokens_per_iteration / told.elapsed_ms * 1e3}
        elif metrics and (match := _TIMER.match(line)):
            timers.setdefault(match[1], []).append((float(match[2]), float(match[3])))
        elif match := _MEMORY.match(line):
            memory[int(match[1])] = Memory(*map(float, match.groups()[1:]))
    return UpstreamLog(
        metrics=tuple(metrics[iteration] for iteration in sorted(metrics)),
        timers={name: _middle(pairs[1:] or pairs) for name, pairs in timers.items()},
        memory=dict(sorted(memory.items())),
    )


def _middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return median(least for least, _ in pairs), median(largest for _, largest in pairs)
