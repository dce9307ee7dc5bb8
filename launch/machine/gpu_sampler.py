"""python -m launch.machine.gpu_sampler RUN NODE SECONDS: writes every so many seconds what this machine's GPUs do.

A process of its own, one for each node of a run: a driver that is sick may hold whoever asks it for minutes, or for
ever, and no signal helps then. Nobody waits for this process, and nothing but its files depends on it. It ends with
its parent, or when there is no GPU. Its environment says which GPUs are the run's (CUDA_VISIBLE_DEVICES) and which
processes (TDPP_RUN_TOKEN).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from conf.errors import RunFolderError
from conf.run_folder.gpu_lines import GpuEntry, GpuReading, GpuSample, GpuTrouble, Meter, entry_text, read_energy
from conf.run_folder.run_files import appended
from conf.run_folder.rundir import RunDir
from launch.errors import LaunchError
from launch.machine import processes
from launch.machine.gpus import GpuHealth, Gpus, visible
from megatron_ext.contract.files import write_json
from megatron_ext.contract.worker import TOKEN

MAX_BYTES = 32 * 2**20
"""A file that has grown to this, by 8 GPUs in three days, becomes <node>.gpu.1 and takes the place of an older one."""
LATE_S = 60.0
"""Until it is reported that a driver does not even say which GPUs there are. Later, missing readings show that."""
DEVICES = "CUDA_VISIBLE_DEVICES"
_REAP_S = 1.0


@contextmanager
def gpu_sampling(run: RunDir, node: str, interval_s: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Samples the GPUs of this machine into nodes/<node>.gpu meanwhile; not at all every 0 s.

    `environment` is what the node's ranks are given.
    """
    if interval_s == 0:
        yield
        return
    own = {name: value for name, value in os.environ.items() if name != DEVICES}
    own |= {name: environment[name] for name in (DEVICES, TOKEN) if name in environment}
    words = ["launch.machine.gpu_sampler", str(run.path), node, str(interval_s)]
    sampler = processes.helper(run, node, words, own)
    try:
        yield
    finally:
        os.killpg(sampler.pid, signal.SIGKILL)
        try:
            sampler.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # the driver holds it; it ends when that lets go
            print(f"the GPU driver of node {node} does not answer: process {sampler.pid} hangs", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    sample(RunDir(Path(argv[0])), argv[1], int(argv[2]), os.environ.get(DEVICES), os.environ[TOKEN])
    return 0


def sample(run: RunDir, node: str, interval_s: int, devices: str | None, token: str) -> None:
    """Appends a reading every `interval_s`; returns when there is no GPU to read."""
    host, path = socket.gethostname(), run.node_gpu(node)
    late = GpuTrouble(unix=int(time.time() + LATE_S), text=f"{host}: the GPU driver has not answered for {LATE_S:g} s")
    timer = threading.Timer(LATE_S, append, (path, late))
    timer.start()
    try:
        source = Gpus()
        gpus, unmatched = visible(source.read(), devices)
    except LaunchError as error:
        append(path, GpuTrouble(unix=int(time.time()), text=str(error)))
        return
    finally:
        timer.cancel()
    if unmatched is not None or not gpus:
        what = f"{unmatched} is not a GPU of this node" if unmatched else "it hides every GPU"
        append(path, GpuTrouble(unix=int(time.time()), text=f"{DEVICES}={devices} on {host}: {what}"))
    number, due = 1, time.monotonic()
    log, known, meter = KernelLog(), set[str](), _meter(run.node_energy(node))
    while gpus:
        reading = take(source, devices, token, host, number, interval_s)
        meter.add(reading)
        new = [text for text in _faults(source, reading.gpus, log, devices) if text not in known]
        known.update(new)
        with suppress(OSError):  # a full disk: a gap in the file, not the end of the sampling
            for text in new:
                append(path, GpuTrouble(unix=reading.unix, text=text))
            append(path, reading)
            write_json(run.node_energy(node), {"gpus": [asdict(gpu) for gpu in meter.gpus]})
        number += 1
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _meter(path: Path) -> Meter:
    """Returns the sums of earlier starts, to go on with; without those of a file that is damaged."""
    try:
        return Meter(read_energy(path))
    except (FileNotFoundError, RunFolderError):
        return Meter()


def take(source: Gpus, devices: str | None, token: str, host: str, number: int, interval_s: int) -> GpuReading:
    """Reads the run's GPUs once, and finds out whose processes are on them."""
    gpus, _ = visible(source.read(), devices)
    owned = tuple(_owned(gpu, token) for gpu in gpus)
    return GpuReading(unix=int(time.time()), host=host, number=number, interval_s=interval_s, gpus=owned)


def _faults(source: Gpus, samples: Sequence[GpuSample], log: KernelLog, devices: str | None) -> list[str]:
    """Returns the faults of the run's GPUs, and of all that cannot be used where the run has no list of its own."""
    xids, own = log.xids(), {sample.index for sample in samples}
    health = [gpu for gpu in source.health() if gpu.index in own or (devices is None and gpu.fault is not None)]
    return faults(health, samples, xids, log_readable=log.readable)


def _owned(gpu: GpuSample, token: str) -> GpuSample:
    if gpu.processes is None:
        return gpu
    return replace(gpu, processes=tuple(replace(p, ours=processes.is_of(token, p.pid)) for p in gpu.processes))


def append(path: Path, entry: GpuEntry) -> None:
    """Adds an entry, in one piece, and on a line of its own whatever an interrupted writer left before it."""
    if path.exists() and path.stat().st_size > MAX_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))
    with appended(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        cut_off = file.read(1) not in (b"", b"\n")
        os.write(file.fileno(), (b"\n" if cut_off else b"") + entry_text(entry).encode())


KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""The bytes of a record of the kernel's log, at most (printk's CONSOLE_EXT_LOG_MAX)."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
