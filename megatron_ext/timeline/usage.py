"""How much memory a rank takes, how many bytes it sends, counted where it sends them, and how it waits for samples.

Of what the library sends for a rank, an all-reduce or an all-gather, a ring's part is counted: the least that any way
to do it sends, if all ranks send as much.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union
from typing import Counter as CounterOf

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.events import ALL_REDUCE, TENSOR, TRAFFIC, WEIGHTS
from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place

MIB = 2.0**20
VMSTAT = Path("/proc/vmstat")
STATM = Path("/proc/self/statm")
EVERY_S = 30.0
"""Between two writes of the file while a rank trains."""
MOST_POINTS = 1024


class PeakSeries:
    """The most of something in each iteration, or, of more than MOST_POINTS, in spans of 2, 4, 8 and so on of them."""

    def __init__(self) -> None:
        self.points: List[Tuple[int, float]] = []
        """The last iteration of each span, and the most in it."""
        self._span = 1

    def add(self, iteration: int, value: float) -> None:
        """`iteration` is after all that were added before."""
        self._join(iteration, value)
        if len(self.points) > MOST_POINTS:
            self._span *= 2
            before, self.points = self.points, []
            for point in before:
                self._join(*point)

    def _join(self, iteration: int, value: float) -> None:
        if self.points and (self.points[-1][0] - 1) // self._span == (iteration - 1) // self._span:
            value = max(value, self.points.pop()[1])
        self.points.append((iteration, value))


class MemoryReport:
    """What a rank takes, for memory/rank-*.json and for the log."""

    def __init__(self, plan: Plan, place: Place) -> None:
        """Peaks are those of training: what torch took to tune kernels before is gone."""
        self._plan = plan
        self._place = place
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # or training would find what it freed in pieces
            torch.cuda.reset_peak_memory_stats()
        self._peaks: Dict[str, float] = {}
        self._series = PeakSeries()
        self._written = time.monotonic()

    def note(self, iteration: int) -> None:
        """Called after each iteration: what it took, of a GPU at most, of a CPU at its end."""
        if self._plan.device == "cuda":
            self._series.add(iteration, self._measured()["max_allocated"])
            torch.cuda.reset_peak_memory_stats()
        else:
            self._series.add(iteration, resident_mib())
        if time.monotonic() - self._written > EVERY_S:
            self._write(iteration, self._with_peaks())

    def report(self, iteration: int) -> None:
        """Prints a line as Megatron does and rewrites the file."""
        used = self._with_peaks()
        shown = " | ".join(f"{name.replace('_', ' ')}: {size}" for name, size in used.items())
        print(f"[Rank {self._place.rank}] (after {iteration} iterations) memory (MB) | {shown}", flush=True)
        self._write(iteration, used)

    def _measured(self) -> Dict[str, float]:
        """Now; peaks are those since they were last reset, and are kept."""
        used = measure(self._plan.device)
        for name, mib in used.items():
            if name.startswith("max_"):
                self._peaks[name] = max(mib, self._peaks.get(name, 0.0))
        return used

    def _with_peaks(self) -> Dict[str, float]:
        """Now, with the peaks since the start."""
        return {**self._measured(), **self._peaks}

    def _write(self, iteration: int, used: Dict[str, float]) -> None:
        self._written = time.monotonic()
        path = self._plan.files.rank_memory(self._place.rank)
        path.parent.mkdir(exist_ok=True)
        content: Dict[str, Any] = {"rank": self._place.rank, "stage": self._place.stage, "iteration": iteration}
        points = self._series.points
        course = {"iterations": [at for at, _ in points], "mib": [round(mib, 2) for _, mib in points]}
        write_json(path, {**content, "mib": used, "course": course})


def measure(device: str) -> Dict[str, float]:
    """MiB by kind: of the GPU's allocator, or what the process had resident on a CPU."""
    if device == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated() / MIB,
            "max_allocated": torch.cuda.max_memory_allocated() / MIB,
            "reserved": torch.cuda.memory_reserved() / MIB,
            "max_reserved": torch.cuda.max_memory_reserved() / MIB,
        }
    return {"max_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def resident_mib() -> float:
    """What the process has resident now."""
    return int(STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize() / MIB


def kernel_kills() -> int:
    """How many processes of this machine, or of its container, the kernel has killed because memory ran out."""
    counts = dict(line.split() for line in VMSTAT.read_text(encoding="ascii").splitlines())
    return int(counts.get("oom_kill", 0))  # not before Linux 4.13


class Traffic:
    """Counts the bytes that a rank sends, by kind of `megatron_ext.contract.events`."""

    def __init__(self) -> None:
        self._counted: CounterOf[Tuple[str, int]] = Counter()
        """Counts for each kind and divisor, for a ring's part of a tensor need not be whole bytes."""
        self._on = False

    def begin(self) -> None:
        """Called when training begins: what a model sends before, to warm up, does not count."""
        self._on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is sent meanwhile does not count."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def sent(self, kind: str, tensor: Tensor) -> None:
        """Counts a message to one rank."""
        if self._on:
            self._counted[kind, 1] += tensor.nbytes

    def all_reduced(self, tensor: Tensor, group: Optional[dist.ProcessGroup], kind: str = ALL_REDUCE) -> None:
        """Counts a sum over a group: every rank sends a share for each other rank, and then the sum of one for each."""
        self._shared(kind, tensor, group, 2)

    def all_gathered(self, own: Tensor, group: Optional[dist.ProcessGroup], kind: str = WEIGHTS) -> None:
        """Counts what is handed to all others of a group."""
        if self._on and group is not None:
            self._counted[kind, 1] += (dist.get_world_size(group) - 1) * own.nbytes

    def shared_out(self, whole: Tensor, group: Optional[dist.ProcessGroup]) -> None:
        """Counts the same, where each rank of the group hands its part of `whole` to all others."""
        self._shared(WEIGHTS, whole, group, 1)

    def reduce_scattered(self, tensor: Tensor, group: Optional[dist.ProcessGroup], kind: str = TENSOR) -> None:
        """Counts a sum over a group, of which each rank takes a share."""
        self._shared(kind, tensor, group, 1)

    def _shared(self, kind: str, tensor: Tensor, group: Optional[dist.ProcessGroup], times: int) -> None:
        if self._on and group is not None:
            ranks = dist.get_world_size(group)
            self._counted[kind, ranks] += times * (ranks - 1) * tensor.nbytes

    def total(self) -> Dict[str, Union[int, float]]:
        """Returns the bytes of each kind: a whole number where they are."""
        sums = {kind: Fraction(0) for kind in TRAFFIC}
        for (kind, divisor), count in self._counted.items():
            sums[kind] += Fraction(count, divisor)
        return {kind: int(found) if found.denominator == 1 else float(found) for kind, found in sums.items()}


def report_traffic(plan: Plan, place: Place, traffic: Traffic, iteration: int, samples: int) -> None:
    """Rewrites traffic/rank-*.json: what was sent up to the end of an iteration, and for how many samples of a run."""
    path = plan.files.rank_traffic(place.rank)
    path.parent.mkdir(exist_ok=True)
    content = {"rank": place.rank, "stage": place.stage, "iteration": iteration, "samples": samples}
    write_json(path, {**content, "bytes": traffic.total()})


WAITS_EVERY_S = 60.0
"""A line stands for the iterations of so many seconds, at least."""


class SampleWaits:
    """Appends to waits/rank-*.jsonl what the rank's iterations waited for their samples on average."""

    def __init__(self, path: Path, iteration: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`iteration` is the last one before this start; a rank that reads no samples has no file."""
        self._path = path
        self._clock = clock
        self._iteration, self._waited, self._since = iteration, 0.0, clock()

    def note(self, iteration: int, waited_s: float) -> None:
        """Called after each iteration with the seconds that the rank has waited since the start."""
        now = self._clock()
        if now - self._since < WAITS_EVERY_S or waited_s == 0.0:
            return
        each_ms = 1e3 * (waited_s - self._waited) / (iteration - self._iteration)
        line = {"iteration": iteration, "unix": time.time(), "wait_ms": round(each_ms, 3)}
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._iteration, self._waited, self._since = iteration, waited_s, now
