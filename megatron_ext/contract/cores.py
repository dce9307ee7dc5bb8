"""How many CPU cores a process may use: one answer for all that count them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Iterator, Optional

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
"""cgroups(7): a line of each hierarchy, `number:controllers:path`; version 2 names no controllers."""


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Counts the cores by the affinity of this process, and by the CPU quotas of its container or job, rounded up.

    Args:
        cgroups: where the hierarchies of cgroups are mounted.
        own: the file that names the cgroups of this process.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for folder in _folders(cgroups, own) for quota in (_quota(folder),) if quota is not None)
    return min([usable, *(max(1, math.ceil(quota)) for quota in quotas)])


def _folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """All cgroups around this process that can limit its CPU; a container may see its own as the root."""
    yield cgroups
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers or "cpu" in controllers.split(","):
            folder = cgroups / controllers
            yield folder
            for part in path.split("/"):
                folder = folder / part
                yield folder


def _quota(folder: Path) -> Optional[float]:
    """In cores, as version 2 or version 1 writes it; None where there is none ("max", -1)."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
