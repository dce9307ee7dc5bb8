"""What one iteration asked of the GPU, as torch's profiler recorded it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of a trace's events that keep the GPU at work."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls in which the host waits for the GPU. A copy to memory that is not pinned ends in the first of them."""
LONGEST, NAMES = 12, 120
"""Kernels that are kept by name, and characters of their names, which C++ makes long."""


@dataclass(frozen=True)
class Counts:
    """Describes one iteration."""

    kernels: int
    host_waits: int
    idle: float | None
    """The part of the time between the first and the last kernel in which none ran; None without a GPU."""
    longest: list[tuple[str, int, float]]
    """The kernels that took most of it: name, how many, and ms together."""


@dataclass(frozen=True)
class Result:
    """Describes a training run on one device."""

    samples_per_s: float
    mib: dict[str, float]
    """Memory as `megatron_ext.timeline.usage.measure` says."""
    losses: list[float]
    counts: Counts


def counts(events: Iterable[dict[str, Any]]) -> Counts:
    """Reads the events of a trace in Chrome's format; times in µs."""
    spans, waits = [], 0
    number: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for event in events:
        kind = event.get("cat")
        if kind in ON_GPU:
            spans.append((event["ts"], event["ts"] + event["dur"]))
        if kind == "kernel":
            number[event["name"]] += 1
            taken[event["name"]] += event["dur"]
        waits += kind == "cuda_runtime" and event["name"] in WAITS
    longest = [(name[:NAMES], number[name], us / 1e3) for name, us in taken.most_common(LONGEST)]
    return Counts(number.total(), waits, _idle(sorted(spans)), longest)


def _idle(spans: list[tuple[float, float]]) -> float | None:
    """The uncovered part of the time from the first start to the last end; spans are sorted by their start."""
    if not spans:
        return None
    begin, end = spans[0]
    idle = 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - begin) if end > begin else 0.0


def counts_of_file(trace: Path) -> Counts:
    with gzip.open(trace) as file:
        return counts(json.load(file)["traceEvents"])


def counted(step: Callable[[], object], device: str) -> Counts:
    """Profiles one call of `step`."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=kinds) as found:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        found.export_chrome_trace(str(path))
        return counts_of_file(path)
