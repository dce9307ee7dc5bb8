"""The readings of a node's GPUs (docs/formats.md): their lines in nodes/<node>.gpu, for people who follow the file and
for programs, and their sums in nodes/<node>.energy.json, what each GPU has taken in each start of a run.

A reading is a line with the time and the number of GPUs, then a line for each of them, which begins as gpustat's do.
The file of the lines is limited in size, so that it does not cover a run of weeks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from conf.run_folder.json_values import Count, Unix, typed
from conf.run_folder.run_files import parse_json, read_text
from conf.visible import plural

_UNKNOWN = "??"
_NONE = "-"
_NAME_WIDTH = 16
_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.+)")
_BEGIN = re.compile(r"^\d{4}-\d\d-\d\dT", re.MULTILINE)
_HEAD = re.compile(r"(\S+): ([1-9]\d{0,5}) GPUs?, reading (\d{1,12}), every (\d{1,9}) s")
_GPU = re.compile(
    r"\[(?P<index>\d{1,6})\] (?P<name>[^|]*?) +\| *(?P<temperature_c>\S+)'C, +(?P<utilisation>\S+) % "
    r"\| +(?P<memory_used_mib>\S+) / +(?P<memory_total_mib>\S+) MB \| +(?P<power_w>\S+) / +(?P<power_limit_w>\S+) W "
    r"\| (?P<processes>[^|]+?) \| (?P<uuid>[^ |]+)(?: \| clocks: (?P<clocks>[^|]+))?"
    r"(?: \| energy: (?P<energy_j>\d{1,15}) J)?(?: \| (?P<fault>[^|]+))?"
)
_NUMBERS = ("temperature_c", "utilisation", "memory_used_mib", "memory_total_mib", "power_w", "power_limit_w")
_PROCESS = re.compile(r"([!?]?)(\d{1,12})\((\d{1,9}|\?\?)M\)")
_MARKS = {True: "", False: "!", None: "?"}
_OURS = {mark: ours for ours, mark in _MARKS.items()}

POWER_CAP, HARDWARE_SLOWDOWN, POWER_BRAKE = "power cap", "hardware slowdown", "power brake"
SOFTWARE_HEAT, HARDWARE_HEAT = "heat (software)", "heat (hardware)"
WAYS_OUT = {
    HARDWARE_HEAT: "check its cooling",
    SOFTWARE_HEAT: "check its cooling",
    POWER_BRAKE: "check the node's power supply",
    HARDWARE_SLOWDOWN: "check its cooling and the node's power supply",
}
"""Words for reasons for lower clocks that no GPU at ordinary work has. Hardware slowdown comes beside the heat or power
brake that it follows from."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_mib: int | None
    ours: bool | None
    """Whether it belongs to the run; None where that cannot be seen, as from another process namespace."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A GPU at one moment. What it does not tell is None: one that is lost tells nothing more."""

    index: int
    """On the node, as nvidia-smi counts; a MIG device has that of its GPU."""
    uuid: str
    name: str
    utilisation: int | None = None
    """Percent of the time in which a kernel ran; one that only waits for another GPU counts as well."""
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    power_w: int | None = None
    power_limit_w: int | None = None
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    clocks: tuple[str, ...] | None = None
    """What keeps its clocks from their highest (`launch.machine.gpus.CLOCKS`), such as `power cap`; empty: nothing."""
    energy_j: int | None = None
    """What it has taken since its driver was loaded, joules, by its own counter."""
    fault: str | None = None
    """Why it cannot be read any more, in the driver's words, such as `GPU is lost`."""

    @property
    def throttled(self) -> tuple[str, ...]:
        """Reasons for lower clocks for which somebody should look at the GPU, the most telling first."""
        return tuple(reason for reason in WAYS_OUT if reason in (self.clocks or ()))


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """All GPUs that a node may use, in the order in which CUDA counts them."""

    unix: int
    host: str
    number: int
    """From 1, since the sampling began."""
    interval_s: int
    """0 where the times of readings are not known, as in a file of gpustat without its headers."""
    gpus: tuple[GpuSample, ...]


@dataclass(frozen=True, kw_only=True)
class GpuTrouble:
    """What was written in the place of a reading: why there is none."""

    unix: int
    text: str


GpuEntry = GpuReading | GpuTrouble


def entry_text(entry: GpuEntry) -> str:
    """The lines of an entry, each with its end."""
    time = datetime.fromtimestamp(entry.unix).astimezone().isoformat(timespec="seconds")
    if isinstance(entry, GpuTrouble):
        return f"{time} {' '.join(entry.text.split())}\n"
    count = len(entry.gpus)
    head = f"{entry.host}: {plural(count, 'GPU')}, reading {entry.number}, every {entry.interval_s} s"
    width = max((_NAME_WIDTH, *(len(gpu.name) for gpu in entry.gpus)))
    return "".join(f"{line}\n" for line in (f"{time} {head}", *(_gpu_line(gpu, width) for gpu in entry.gpus)))


def _gpu_line(gpu: GpuSample, width: int) -> str:
    clocks = "" if gpu.clocks is None else f" | clocks: {', '.join(gpu.clocks) or _NONE}"
    energy = "" if gpu.energy_j is None else f" | energy: {gpu.energy_j} J"
    fault = "" if gpu.fault is None else f" | {' '.join(gpu.fault.replace('|', '/').split())}"
    return (
        f"[{gpu.index}] {gpu.name:<{width}} |{_shown(gpu.temperature_c):>3}'C, {_shown(gpu.utilisation):>3} % | "
        f"{_shown(gpu.memory_used_mib):>5} / {_shown(gpu.memory_total_mib):>5} MB | {_shown(gpu.power_w):>3} / "
        f"{_shown(gpu.power_limit_w):>3} W | {_processes(gpu.processes)} | {gpu.uuid}{clocks}{energy}{fault}"
    )


def _processes(processes: tuple[GpuProcess, ...] | None) -> str:
    if processes is None:
        return _UNKNOWN
    return " ".join(f"{_MARKS[p.ours]}{p.pid}({_shown(p.memory_mib)}M)" for p in processes) or _NONE


def _shown(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def entries(text: str, last: int | None = None) -> tuple[GpuEntry, ...]:
    """The whole entries in a part of the file, which may begin and end anywhere; of many, only the last so many."""
    if last is not None:
        begins = [begin.start() for begin in _BEGIN.finditer(text)]
        text = text[begins[-last - 1] :] if len(begins) > last else text  # one more: the very last may not be whole
    found = tuple(_entries(text.split("\n")[:-1]))  # what has no end yet is still being written
    return found if last is None else found[-last:]


def _entries(lines: Iterable[str]) -> Iterator[GpuEntry]:
    unix, head, gpus = 0, None, list[GpuSample]()
    for line in lines:
        timed = _timed(line)
        gpu = _gpu(line) if timed is None and head is not None else None
        if timed is not None:
            unix, text = timed
            head, gpus = _HEAD.fullmatch(text), []
            if head is None:
                yield GpuTrouble(unix=unix, text=text)
        elif head is not None and gpu is not None:
            gpus.append(gpu)
            if len(gpus) == int(head[2]):
                yield GpuReading(
                    unix=unix, host=head[1], number=int(head[3]), interval_s=int(head[4]), gpus=tuple(gpus)
                )
                head = None
        else:  # what a writer left that was cut off
            head = None


def _timed(line: str) -> tuple[int, str] | None:
    """The time, in seconds since 1970, and the rest of a line that begins with one."""
    found = _TIMED.fullmatch(line)
    if found is None:
        return None
    try:
        return int(datetime.fromisoformat(found[1]).timestamp()), found[2]
    except ValueError:
        return None


def _gpu(line: str) -> GpuSample | None:
    """What a GPU's line says; None for another one, or one that is damaged."""
    found = _GPU.fullmatch(line)
    if found is None:
        return None
    try:
        numbers = {key: _number(found[key]) for key in _NUMBERS}
        processes = _processes_of(found["processes"])
    except ValueError:
        return None
    return GpuSample(
        index=int(found["index"]),
        uuid=found["uuid"],
        name=found["name"],
        processes=processes,
        clocks=_clocks_of(found["clocks"]),
        energy_j=None if found["energy_j"] is None else int(found["energy_j"]),
        fault=found["fault"],
        **numbers,
    )


def _number(text: str) -> int | None:
    """Raises ValueError for what is not a number of such a line."""
    if text != _UNKNOWN and not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ValueError(text)
    return None if text == _UNKNOWN else int(text)


def _clocks_of(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text == _NONE else tuple(text.split(", "))


def _processes_of(text: str) -> tuple[GpuProcess, ...] | None:
    """Raises ValueError for what is not a list of processes."""
    if text == _UNKNOWN:
        return None
    found = []
    for word in text.split(" ") if text != _NONE else ():
        match = _PROCESS.fullmatch(word)
        if match is None:
            raise ValueError(word)
        memory = None if match[3] == _UNKNOWN else int(match[3])
        found.append(GpuProcess(pid=int(match[2]), memory_mib=memory, ours=_OURS[match[1]]))
    return tuple(found)


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
