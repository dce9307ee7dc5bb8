"""How much memory a rank takes, and whether the kernel killed for want of it."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place

MIB = 2.0**20
VMSTAT = Path("/proc/vmstat")
STATM = Path("/proc/self/statm")
EVERY_S = 30.0
"""Between two writes of the file while a rank trains."""
MOST_POINTS = 1024


class Course:
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
        self._plan = plan
        self._place = place
        self._peaks: Dict[str, float] = {}
        self._course = Course()
        self._written = time.monotonic()

    def note(self, iteration: int) -> None:
        """Called after each iteration: what it took, of a GPU at most, of a CPU at its end."""
        if self._plan.device == "cuda":
            self._course.add(iteration, self._measured()["max_allocated"])
            torch.cuda.reset_peak_memory_stats()
        else:
            self._course.add(iteration, resident_mib())
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
        points = self._course.points
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
