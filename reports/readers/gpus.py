"""What the GPUs of a run did, from the readings in `nodes/<node>.gpu`, or in what gpustat left of an older job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from conf.errors import RunFolderError
from conf.run_folder.gpu_lines import GpuReading, GpuSample, GpuTrouble, entries
from conf.run_folder.run_files import read_tail
from conf.run_folder.rundir import RunDir
from reports.readers import gpustat
from reports.readers.record import Record

BYTES = 16 << 20
"""Read of all files together, of each its end, so that a report does not take minutes after weeks of readings."""
LEAST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One GPU over the readings that were looked at; a figure that it never told is NaN."""

    node: str
    index: int
    name: str
    utilisation: float
    """Percent, median over the readings in which a process of the run computed on it, else over all."""
    power_w: float
    """Median likewise."""
    power_limit_w: float
    memory_mib: float
    """The most."""
    memory_total_mib: float
    temperature_c: float
    """The most."""
    fault: str | None


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    uses: Sequence[GpuUse]
    at_h: Sequence[float]
    """Hours since the first reading that was looked at; none where readings have no times."""
    utilisation: Sequence[float]
    """Percent at these times, the mean over all GPUs."""
    power_w: Sequence[float]
    """At these times, the sum over all GPUs."""
    troubles: Sequence[str]
    """What was written in the place of readings, each once, with its nodes."""


def read_gpus(run: RunDir, record: Record) -> GpuReport | None:
    """None for a run whose GPUs were not sampled."""
    return read_files({node.name: run.node_gpu(node.name) for node in record.plan.nodes})


def read_files(paths: Mapping[str, Path]) -> GpuReport | None:
    """What the nodes' files say, as tdpp or gpustat writes them; None if there is none of them."""
    share = max(LEAST_BYTES, BYTES // max(len(paths), 1))
    texts, unread = {}, list[str]()
    for node, path in paths.items():
        try:
            texts[node] = read_tail(path, share)[0].decode(errors="replace")
        except FileNotFoundError:
            continue
        except RunFolderError as error:
            unread.append(str(error))
    if not texts and not unread:
        return None
    report = gpu_report(texts)
    return replace(report, troubles=[*report.troubles, *unread])


def gpu_report(texts: Mapping[str, str]) -> GpuReport:
    """Of what the nodes' files hold, which may begin anywhere."""
    found = {node: entries(text) or gpustat.readings(text) for node, text in texts.items()}
    uses, troubles = [], dict[str, list[str]]()
    readings = {node: [one for one in told if isinstance(one, GpuReading)] for node, told in found.items()}
    for node, told in found.items():
        for one in told:
            if isinstance(one, GpuTrouble) and node not in troubles.setdefault(one.text, []):
                troubles[one.text].append(node)
        for place in range(max((len(one.gpus) for one in readings[node]), default=0)):
            uses.append(_use(node, [one.gpus[place] for one in readings[node] if place < len(one.gpus)]))
    at_h, utilisation, power_w = _course([one for told in readings.values() for one in told if one.interval_s])
    return GpuReport(
        uses=uses,
        at_h=at_h,
        utilisation=utilisation,
        power_w=power_w,
        troubles=[f"{', '.join(nodes)}: {text}" for text, nodes in troubles.items()],
    )


def _use(node: str, samples: Sequence[GpuSample]) -> GpuUse:
    last = samples[-1]
    at_work = [one for one in samples if one.processes and any(process.ours for process in one.processes)] or samples
    return GpuUse(
        node=node,
        index=last.index,
        name=last.name,
        utilisation=_median(one.utilisation for one in at_work),
        power_w=_median(one.power_w for one in at_work),
        power_limit_w=_median(one.power_limit_w for one in samples),
        memory_mib=_most(one.memory_used_mib for one in samples),
        memory_total_mib=_most(one.memory_total_mib for one in samples),
        temperature_c=_most(one.temperature_c for one in samples),
        fault=last.fault,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float:
    known = _known(values)
    return median(known) if known else math.nan


def _most(values: Iterable[float | None]) -> float:
    return max(_known(values), default=math.nan)


def _course(readings: Sequence[GpuReading], most: int = 200) -> tuple[list[float], list[float], list[float]]:
    """Hours, mean utilisation and summed power, of at most so many spans of equal length."""
    if not readings:
        return [], [], []
    begin, end = min(one.unix for one in readings), max(one.unix for one in readings)
    span = max((end - begin) / most, max(one.interval_s for one in readings), 1)
    spans: dict[int, dict[str, list[GpuSample]]] = {}
    for one in readings:
        for gpu in one.gpus:
            spans.setdefault(int((one.unix - begin) / span), {}).setdefault(gpu.uuid, []).append(gpu)
    at, use, power = [], [], []
    for number, gpus in sorted(spans.items()):
        at.append((number + 0.5) * span / 3600)
        means = [_median(gpu.utilisation for gpu in samples) for samples in gpus.values()]
        known = [value for value in means if not math.isnan(value)]
        use.append(sum(known) / len(known) if known else math.nan)
        watts = [_median(gpu.power_w for gpu in samples) for samples in gpus.values()]
        power.append(sum(watts))
    return at, use, power
