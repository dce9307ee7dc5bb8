"""nodes/<node>.energy.json: what each GPU has taken in each start of a run (docs/formats.md).

The readings beside it are limited in size, so that their sum does not cover a run of weeks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.run_folder.gpu_lines import GpuReading, GpuSample
from conf.run_folder.json_values import Count, Unix, typed
from conf.run_folder.run_files import parse_json, read_text

LONGEST = 2
"""A reading stands for the time to the next one, at most so many intervals: in a gap nobody knows."""
_KWH = 3.6e6
"""Joules."""


@dataclass(frozen=True, kw_only=True)
class GpuEnergy:
    """A GPU from the first reading of its power to the latest, in one start of a node."""

    uuid: str
    place: Count
    """Among the GPUs of its node."""
    begin_unix: Unix
    end_unix: Unix
    hours: float = 0.0
    """In which its power was known."""
    kwh: float = 0.0
    counted_kwh: float = 0.0
    """What its driver counted between readings; 0 where it does not count."""
    beside_kwh: float = 0.0
    """What the readings of its power make of the same time."""


@dataclass(frozen=True, kw_only=True)
class _File:
    gpus: tuple[GpuEnergy, ...]


def read_energy(path: Path) -> tuple[GpuEnergy, ...]:
    """Returns what the file says.

    Raises:
        FileNotFoundError: it is not there.
        RunFolderError: it cannot be read or is damaged.
    """
    return typed(_File, parse_json(read_text(path), str(path)), str(path)).gpus


class Meter:
    """Sums up readings of the GPUs of a node."""

    def __init__(self, before: Sequence[GpuEnergy] = ()) -> None:
        self._ended = list(before)
        self._now: dict[str, tuple[GpuEnergy, GpuReading, GpuSample]] = {}
        """The sums of each UUID, which count an interval for the latest reading, and that reading."""

    @property
    def gpus(self) -> tuple[GpuEnergy, ...]:
        return (*self._ended, *(energy for energy, _, _ in self._now.values()))

    def add(self, reading: GpuReading) -> None:
        """Takes the next reading; the first of a start begins new sums."""
        if reading.number == 1:
            self._ended, self._now = list(self.gpus), {}
        for place, gpu in enumerate(reading.gpus if reading.interval_s else ()):
            if gpu.power_w is None:
                continue
            if gpu.uuid in self._now:
                energy = _until(reading.unix, gpu, *self._now[gpu.uuid])
            else:
                energy = GpuEnergy(uuid=gpu.uuid, place=place, begin_unix=reading.unix, end_unix=reading.unix)
            self._now[gpu.uuid] = (_plus(energy, gpu.power_w, reading.interval_s), reading, gpu)


def _until(unix: int, gpu: GpuSample, energy: GpuEnergy, last: GpuReading, then: GpuSample) -> GpuEnergy:
    """Corrects the time that the last reading stands for, at the next one."""
    since = max(unix - last.unix, 0)  # a clock may be set back
    known, watts = min(since, LONGEST * last.interval_s), then.power_w or 0
    energy = replace(_plus(energy, watts, known - last.interval_s), end_unix=max(energy.end_unix, unix))
    if since > known or gpu.energy_j is None or then.energy_j is None or gpu.energy_j < then.energy_j:
        return energy  # a driver that is loaded again counts from 0
    counted_kwh = energy.counted_kwh + (gpu.energy_j - then.energy_j) / _KWH
    return replace(energy, counted_kwh=counted_kwh, beside_kwh=energy.beside_kwh + watts * known / _KWH)


def _plus(energy: GpuEnergy, watts: int, seconds: int) -> GpuEnergy:
    return replace(energy, hours=energy.hours + seconds / 3600, kwh=energy.kwh + watts * seconds / _KWH)
