"""What is wrong with a GPU by its driver and by the kernel's log, in sentences that say what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.run_folder.gpu_lines import GpuSample
from launch.machine.gpus import GpuHealth

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""Of a record of the kernel's log, at most (printk's CONSOLE_EXT_LOG_MAX)."""
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d{1,4})")
_RESET = "reset it (nvidia-smi --gpu-reset -i {index}, as root) or restart the node"
XIDS = {
    48: "an uncorrectable error of its memory",
    61: "an internal breakpoint of its microcontroller",
    62: "an internal halt of its microcontroller",
    64: "bad memory could not be retired or remapped",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "many single-bit errors of its memory",
    95: "an uncontained error of its memory",
    119: "its GSP firmware does not answer",
    120: "an error of its GSP firmware",
    140: "an unrecovered ECC error",
}
"""Errors of the hardware or its firmware, after NVIDIA's catalogue of Xid errors; others, such as 13, 31 and 43, come
from a program's own faults."""


@dataclass
class KernelLog:
    """What the kernel says of GPUs, as far as this user may read it: often only root may (kernel.dmesg_restrict)."""

    path: Path = KERNEL_LOG
    readable: bool = True
    _file: int | None = field(default=None, repr=False)

    def xids(self) -> list[tuple[str, int]]:
        """PCI place and number of each Xid error since the last call, at first since the node's start."""
        found = []
        for record in self._records():
            found += [(match["bus"], int(match["number"])) for match in _XID.finditer(record)]
        return found

    def _records(self) -> Iterator[str]:
        try:
            if self._file is None and self.readable:
                self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self.readable = False
        while self._file is not None:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # older records were overwritten meanwhile
                    continue
                self.readable = error.errno == errno.EAGAIN
                return
            if not record:
                return
            yield record.decode(errors="replace")


def faults(
    health: Iterable[GpuHealth], samples: Sequence[GpuSample], xids: Sequence[tuple[str, int]], *, log_readable: bool
) -> list[str]:
    """A sentence for each fault of a GPU, such as `GPU 3 (NVIDIA A10): …`; `samples` tell whose processes are on it."""
    found = []
    for gpu in health:
        name = f" ({gpu.name})" if gpu.name else ""
        used = any(
            process.ours is False
            for sample in samples
            if sample.index == gpu.index
            for process in sample.processes or ()
        )
        numbers = dict.fromkeys(
            number for bus, number in xids if gpu.bus is not None and _place(bus) == _place(gpu.bus)
        )
        found += [
            f"GPU {gpu.index}{name}: {text}" for text in (*_of_driver(gpu, used, log_readable), *_of_log(gpu, numbers))
        ]
    return found


def _of_driver(gpu: GpuHealth, used: bool, log_readable: bool) -> Iterator[str]:
    reset = _RESET.format(index=gpu.index)
    root = f"nvidia-smi -i {gpu.index} -c 0, as root, lets every process use it"
    if gpu.fault is not None:
        log = "" if log_readable else "; the kernel's log, which this user may not read, says why (sudo dmesg)"
        yield f"it cannot be used: {gpu.fault}; {reset}{log}"
        return
    if gpu.compute_mode == _PROHIBITED:
        yield f"it is in prohibited compute mode, so no process can use it; {root}"
    elif gpu.compute_mode in _EXCLUSIVE and used:
        yield (
            "it is in exclusive compute mode and another process is on it, so a rank is refused "
            f"(CUDA: busy or unavailable); end that process, or {root}"
        )
    if gpu.divided and not gpu.parts:
        yield (
            "it is in MIG mode but has no MIG device, so CUDA cannot use it; make one (nvidia-smi mig -cgi PROFILE -C) "
            f"or turn MIG off (nvidia-smi -i {gpu.index} -mig 0), as root"
        )
    if gpu.uncorrected:
        ever = "" if gpu.uncorrected_ever is None else f", {gpu.uncorrected_ever} in its life"
        yield (
            f"{gpu.uncorrected} uncorrected ECC errors since its driver was loaded{ever}: results may be wrong; "
            f"{reset}, and have it replaced if they come again"
        )
    if gpu.remap_failed:
        yield "it has no spare memory rows left for those that fail; have it replaced"
    elif gpu.remap_pending:
        yield f"rows of its memory wait to be replaced by spare ones; {reset} when no job uses it"


_PROHIBITED, _EXCLUSIVE = 2, (1, 3)
"""NVML's numbers of compute modes; 1, exclusive to a thread, is of drivers long gone."""


def _of_log(gpu: GpuHealth, numbers: Iterable[int]) -> Iterator[str]:
    for number in numbers:
        if number in XIDS:
            yield (
                f"the kernel's log has Xid {number}: {XIDS[number]}; {_RESET.format(index=gpu.index)}, and have it "
                f"examined if it happens again"
            )


def _place(bus: str) -> tuple[int, ...]:
    """Domain, bus and device: NVML writes 00000000:3B:00.0 where the kernel writes 0000:3b:00."""
    return tuple(int(part, 16) for part in bus.partition(".")[0].split(":") if part)
