"""What a rank on a CPU may take of its host's memory: Linux kills a process that takes too much.

A size is therefore tried only if what smaller ones took leads one to expect that it fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_ext.parallel.comm import told

USED = 0.9
"""Of what is available when measuring begins; the rest is left to other processes."""
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


class HostMemory:
    """The memory of one rank, which may grow by `may_grow_bytes` in all."""

    def __init__(self, may_grow_bytes: int, ranks: int = 1) -> None:
        self._most = peak_bytes() + may_grow_bytes
        self._ranks = ranks
        self._begun: Optional[int] = None
        self._tried: Tuple[int, int] = (0, 0)

    @classmethod
    def shared(cls) -> HostMemory:
        """An equal part for each rank of this host, before any of them takes more; all ranks of the run call this."""
        own = torch.tensor(list(BOOT_ID.read_bytes()), dtype=torch.uint8)
        hosts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with told("agreeing with the other ranks"):
            dist.all_gather(hosts, own)
            available = available_bytes()
            dist.barrier()
        ranks = sum(torch.equal(host, own) for host in hosts)
        return cls(int(USED * available / ranks), ranks)

    def begin(self, fixed_bytes: int) -> None:
        """What is tried from here on takes `fixed_bytes` at any size, and beyond them as much as its size says."""
        self._begun = peak_bytes() + fixed_bytes
        self._tried = (0, 0)

    def require(self, size: int) -> None:
        """Raises MemoryError if `size` is expected to take more than this rank may."""
        assert self._begun is not None
        tried, took = self._tried
        expected = self._begun + (took * size // tried if tried else 0)
        if expected > self._most:
            raise MemoryError(
                f"out of memory: {expected / 2**30:.1f} GiB would be needed, and of this host's memory each of its "
                f"{self._ranks} ranks may take {self._most / 2**30:.1f} GiB"
            )

    def tried(self, size: int) -> None:
        """`size` has just been tried."""
        assert self._begun is not None
        if size > self._tried[0]:
            self._tried = (size, max(0, peak_bytes() - self._begun))


def peak_bytes() -> int:
    """The most that this process has had in memory."""
    lines = STATUS.read_text(encoding="ascii").splitlines()  # getrusage counts the parent's, too
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def available_bytes() -> int:
    """What processes of this host and of this process's control groups can take now without swapping."""
    lines = MEMINFO.read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """Of each limit of a control group that holds for this process, in version 1 or 2."""
    for line in OWN_GROUPS.read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, file = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            file = "total_inactive_file"
        else:
            continue
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if group == GROUPS.parent:
                break
            most = _read(group / limit)
            if most.isdigit():  # not `max`
                cached = dict(line.split() for line in _read(group / "memory.stat").splitlines()).get(file, 0)
                yield max(0, int(most) - int(_read(group / used)) + int(cached))


def _read(path: Path) -> str:
    """Nothing where there is no such file: in the topmost group, or where a container hides the groups."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
