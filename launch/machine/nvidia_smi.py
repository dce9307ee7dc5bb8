"""GPUs as the command nvidia-smi tells of them, where Python has no NVML.

Its fields and exit codes: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`, and its manual page.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from conf.run_folder.gpu_lines import GpuProcess, GpuSample
from launch.errors import LaunchError
from launch.machine import processes

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "enforced.power.limit",
    "temperature.gpu",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
_NO_VALUE = re.compile(r"\[(.*)\]")
_FAULT = re.compile(r"GPU is lost|GPU requires .*")
"""Of what stands in brackets in the place of a value; anything else there only says that the GPU does not tell it."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What nvidia-smi printed: rows of values, and the rest, which are complaints."""

    rows: tuple[Sequence[str], ...]
    said: str
    exit_code: int


class NvidiaSmi:
    """Every GPU of this machine; the parts of a divided one (MIG) are not told.

    A call may take long, or never return, when the driver is sick.
    """

    def __init__(self) -> None:
        """Raises LaunchError: there is no nvidia-smi, or it knows of no GPU."""
        self._known: dict[int, GpuSample] = {}
        self._known = {gpu.index: gpu for gpu in self.read()}

    def read(self) -> tuple[GpuSample, ...]:
        """Raises LaunchError: nvidia-smi does not answer as it should, for example because the driver is gone."""
        answer = _query("gpu", GPU_FIELDS)
        if not answer.rows:
            raise LaunchError(answer.said or f"it ended with {answer.exit_code} and said nothing")
        apps = _query("compute-apps", PROCESS_FIELDS)
        gpus = {int(row[0]): self._sample(row, apps) for row in answer.rows}
        for index, gpu in self._known.items():
            if index not in gpus:
                gpus[index] = _lost(gpu, answer.said or "nvidia-smi lists it no more")
        return tuple(gpus[index] for index in sorted(gpus))

    def _sample(self, row: Sequence[str], apps: _Answer) -> GpuSample:
        index = int(row[0])
        fault = next((what for value in row if (what := _fault(value)) is not None), None)
        if fault is not None and index in self._known:
            return _lost(self._known[index], fault)
        uuid, name = row[1:3]
        if fault is not None:
            return GpuSample.lost(index=index, uuid=uuid, name=name, fault=fault)
        utilisation, used, total, power, limit, temperature = map(_number, row[3:])
        return GpuSample(
            index=index,
            uuid=uuid,
            name=name,
            utilisation=utilisation,
            memory_used_mib=used,
            memory_total_mib=total,
            power_w=power,
            power_limit_w=limit,
            temperature_c=temperature,
            processes=_processes(apps, uuid),
        )


def _processes(apps: _Answer, uuid: str) -> tuple[GpuProcess, ...] | None:
    """Those of one GPU; None where nvidia-smi did not tell, or told only of a part (MIG) of some GPU."""
    if apps.exit_code != 0 and not apps.rows:
        return None
    found = [(pid, used) for gpu, pid, used in apps.rows if gpu == uuid]
    if not found and any(gpu.startswith("MIG-") for gpu, _, _ in apps.rows):
        return None
    return tuple(GpuProcess(pid=int(pid), memory_mib=_number(used), ours=None) for pid, used in found)


def _query(what: str, fields: Sequence[str]) -> _Answer:
    """Raises LaunchError: nvidia-smi cannot be started."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=processes.die_with_parent,  # it may hang for longer than whoever asked lives
        )
    except FileNotFoundError as error:
        raise LaunchError("it is not on PATH") from error
    except OSError as error:
        raise LaunchError(f"it cannot be started: {error.strerror}") from error
    out, err = process.communicate()
    rows, said = [], []
    for line in [*out.splitlines(), *err.splitlines()]:
        values = line.split(", ")
        if len(values) == len(fields):
            rows.append(values)
        elif line.strip():
            said.append(line.strip())
    return _Answer(rows=tuple(rows), said=" ".join(said), exit_code=process.returncode)


def _fault(value: str) -> str | None:
    bracketed = _NO_VALUE.fullmatch(value)
    return bracketed[1] if bracketed and _FAULT.fullmatch(bracketed[1]) else None


def _number(value: str) -> int | None:
    """Rounded; None for `[N/A]` and its like.

    Raises:
        LaunchError: it is neither.
    """
    if _NO_VALUE.fullmatch(value):
        return None
    try:
        return round(float(value))
    except ValueError as error:
        raise LaunchError(f"it said {value!r} where a number belongs") from error


def _lost(gpu: GpuSample, fault: str) -> GpuSample:
    return GpuSample.lost(index=gpu.index, uuid=gpu.uuid, name=gpu.name, fault=fault)
