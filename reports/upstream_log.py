"""What Megatron-LM says of a run in its logs: iterations, timers, memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from conf.log_lines import iteration_line

_TIMER = re.compile(r" {4}(\S.*?) \.*: \((\d+\.\d+), (\d+\.\d+)\)")
_MIB = r"(\d+(?:\.\d+)?)"
_MEMORY = re.compile(
    rf"\[Rank (\d{{1,6}})\] \(after \d+ iterations\) memory \(MB\) \| allocated: {_MIB} \| max allocated: {_MIB} \| "
    rf"reserved: {_MIB} \| max reserved: {_MIB}"
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

    def with_tokens(self, tokens_per_iteration: int) -> UpstreamLog:
        """The same with `tokens_per_s`, which follows from the tokens of an iteration."""

        def told(line: Mapping[str, Any]) -> Mapping[str, Any]:
            elapsed_ms = line["elapsed_ms"]
            return {**line, "tokens_per_s": tokens_per_iteration / elapsed_ms * 1e3} if elapsed_ms > 0 else line

        return replace(self, metrics=tuple(map(told, self.metrics)))


def parse(lines: Iterable[str]) -> UpstreamLog:
    """Reads the lines of all nodes' logs, node after node; whatever else is in them is passed over.

    Timers count from the first logged iteration on: before it they are those of the set-up.
    """
    metrics: dict[int, Mapping[str, Any]] = {}
    timers: dict[str, list[tuple[float, float]]] = {}
    memory: dict[int, Memory] = {}
    for line in lines:
        if (told := iteration_line(line)) is not None:
            metrics[told.iteration] = {key: value for key, value in asdict(told).items() if value is not None}
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
