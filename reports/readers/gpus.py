"""What the GPUs of a run did, from the readings in `nodes/<node>.gpu`, or in what gpustat left of an older job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pandas as pd

from conf.errors import RunFolderError
from conf.run_folder.gpu_lines import (
    WAYS_OUT,
    GpuEnergy,
    GpuReading,
    GpuSample,
    GpuTrouble,
    Meter,
    entries,
    read_energy,
)
from conf.run_folder.run_files import read_tail
from conf.run_folder.rundir import RunDir
from reports.readers.record import Record

BYTES = 16 << 20
"""Read of all files together, of each its end, so that a report does not take minutes after weeks of readings."""
LEAST_BYTES = 64 << 10
SPANS = 200
"""Points of a course at most."""
USE = (
    *("node", "index", "name", "utilisation", "power_w", "power_limit_w", "memory_mib", "memory_total_mib"),
    *("temperature_c", "fault"),
)
_NUMBERS = (
    *("utilisation", "power_w", "power_limit_w", "memory_used_mib", "memory_total_mib", "temperature_c", "energy_j"),
)


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    uses: pd.DataFrame
    """USE of a GPU a row, over the readings that were looked at. Utilisation, percent, and power are medians over the
    readings in which a process of the run computed on it, else over all; memory and temperature are the most. A figure
    that it never reported is missing."""
    course: pd.DataFrame
    """Over hours since the first reading that was looked at: `utilisation`, percent, the mean over all GPUs, and
    `power_w`, their sum. Empty where readings have no times."""
    energy: Mapping[str, Sequence[GpuEnergy]]
    """What the GPUs of each node took in each start: in the whole run where it kept the sums, else over the readings
    that were looked at."""
    shared: Mapping[str, Sequence[int]]
    """The GPUs of each node on which other processes computed beside those of the run."""
    throttled: Mapping[tuple[str, int], Mapping[str, float]]
    """For each GPU, by node and index, that heat, its power supply or its hardware slowed (`WAYS_OUT`): the part of its
    readings with each such reason, of those in which a process of the run computed on it, else of all."""
    troubles: Sequence[str]
    """What was written in the place of readings, each once, with its nodes."""


def read_gpus(run: RunDir, record: Record) -> GpuReport | None:
    """None for a run whose GPUs were not sampled."""
    found = read_files({node.name: run.node_gpu(node.name) for node in record.plan.nodes})
    if found is None:
        return None
    energy, unread = dict(found.energy), list[str]()
    for path in sorted(run.nodes.glob(run.node_energy("*").name)):  # an elastic run's lost nodes have theirs
        try:
            energy[path.name.removesuffix(run.node_energy("").name)] = read_energy(path)
        except FileNotFoundError:
            continue
        except RunFolderError as error:
            unread.append(str(error))
    return replace(found, energy=energy, troubles=[*found.troubles, *unread])


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
    """Sums up what the nodes' files hold, which may begin anywhere."""
    rows, troubles, shared, meters = [], dict[str, list[str]](), dict[str, set[int]](), dict[str, Meter]()
    for node, text in texts.items():
        for one in entries(text) or readings(text):
            if isinstance(one, GpuTrouble):
                troubles.setdefault(one.text, []).append(node)
                continue
            meters.setdefault(node, Meter()).add(one)
            for place, gpu in enumerate(one.gpus):
                ours = any(process.ours for process in gpu.processes or ())
                if ours and any(process.ours is False for process in gpu.processes or ()):
                    shared.setdefault(node, set()).add(gpu.index)
                rows.append({**vars(gpu), "node": node, "place": place, "ours": ours, "reading": one})
    samples = pd.DataFrame(rows, columns=[*GpuSample.__dataclass_fields__, "node", "place", "ours", "reading"])
    samples = samples.astype(dict.fromkeys(_NUMBERS, "float64"))
    return GpuReport(
        uses=_uses(samples),
        course=_course(samples),
        energy={node: meter.gpus for node, meter in meters.items()},
        throttled=_throttled(samples),
        shared={node: sorted(numbers) for node, numbers in shared.items()},
        troubles=[f"{', '.join(dict.fromkeys(nodes))}: {text}" for text, nodes in troubles.items()],
    )


def _throttled(samples: pd.DataFrame) -> dict[tuple[str, int], dict[str, float]]:
    found = {}
    for (node, _), own in _at_work(samples).groupby(["node", "place"], sort=False):
        reasons = [reason for clocks in own["clocks"] for reason in WAYS_OUT if reason in (clocks or ())]
        if reasons:
            found[str(node), int(own["index"].iloc[-1])] = {
                reason: reasons.count(reason) / len(own) for reason in WAYS_OUT if reason in reasons
            }
    return found


def _at_work(samples: pd.DataFrame) -> pd.DataFrame:
    """Selects readings in which a process of the run computed on the GPU; all of a GPU that none was ever seen on."""
    busy = samples.groupby(["node", "place"])["ours"].transform("any")
    return samples[samples["ours"] | ~busy.astype(bool)]


def _uses(samples: pd.DataFrame) -> pd.DataFrame:
    gpu = ["node", "place"]
    at_work = _at_work(samples).groupby(gpu, sort=False)
    all_of = samples.groupby(gpu, sort=False)
    uses = samples.drop_duplicates(gpu, keep="last").set_index(gpu)[["index", "name", "fault"]]
    uses = uses.join(at_work[["utilisation", "power_w"]].median()).join(all_of[["power_limit_w"]].median())
    uses = uses.join(all_of[["memory_used_mib", "memory_total_mib", "temperature_c"]].max())
    uses = uses.loc[list(all_of.groups)] if len(uses) else uses
    return uses.reset_index().rename(columns={"memory_used_mib": "memory_mib"})[list(USE)]


def _course(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns means over at most `SPANS` spans of equal length."""
    timed = samples.assign(
        unix=[one.unix for one in samples["reading"]], interval_s=[one.interval_s for one in samples["reading"]]
    )
    timed = timed[timed["interval_s"] > 0]
    begin, end = timed["unix"].min(), timed["unix"].max()
    span = max((end - begin) / SPANS, timed["interval_s"].max(), 1) if len(timed) else 1
    hours = ((timed["unix"] - begin) // span + 0.5) * span / 3600
    usual = timed.groupby([hours.rename("hours"), "uuid"])[["utilisation", "power_w"]].median()
    by_hours = usual.groupby("hours")
    power_w = by_hours["power_w"].agg(lambda watts: watts.sum(skipna=False))
    return pd.DataFrame({"utilisation": by_hours["utilisation"].mean(), "power_w": power_w})


_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\([A-Z]|[=>])")
"""Colours and cursor moves, where gpustat took its output for a terminal."""
_HEAD = re.compile(r"(\S+) +(\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})(?: .*)?")
_GPU = re.compile(
    r"\[(?P<index>\d{1,3})\] (?P<name>[^|]*?) *\| *(?P<temperature_c>\d{1,3}|\?\?)(?:'|°)C, "
    r"(?: *(?:\d{1,3}|\?\?) %, )? *(?P<utilisation>\d{1,3}|\?\?) %(?: \([^|]*\))?"
    r"(?:, +(?P<power_w>\d{1,5}|\?\?) (?:/ +(?P<power_limit_w>\d{1,5}|\?\?) )?W)? "
    r"\| +(?P<memory_used_mib>\d{1,7}|\?\?) / +(?P<memory_total_mib>\d{1,7}|\?\?) MB(?: \|.*)?"
)
_GPUSTAT_NUMBERS = ("temperature_c", "utilisation", "power_w", "power_limit_w", "memory_used_mib", "memory_total_mib")


def readings(text: str) -> tuple[GpuReading, ...]:
    """The readings in a part of the file, which may begin and end anywhere; the last one may lack GPUs.

    Times are taken as this machine's local time, for gpustat writes no zone. Processes are not distinguished: gpustat
    names their users, not whose job they are. Without any line of a host and a time (`--no-header`) a reading begins
    where the numbers of GPUs do; its times are not known, and its interval is 0.
    """
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines()]
    found: list[tuple[str, int, list[GpuSample]]] = []
    for line in lines:
        head, gpu = _HEAD.fullmatch(line), _GPU.fullmatch(line)
        if head is not None and (unix := _unix(head[2])) is not None:
            found.append((head[1], unix, []))
        elif gpu is not None and found:
            host, _, gpus = found[-1]
            gpus.append(_sample(gpu, host))
    if not found:
        return _without_times(lines)
    times = [unix for _, unix, _ in found]
    interval_s = max(min((after - before for before, after in pairwise(times)), default=1), 1)
    return tuple(
        GpuReading(unix=unix, host=host, number=number, interval_s=interval_s, gpus=tuple(gpus))
        for number, (host, unix, gpus) in enumerate(found, 1)
        if gpus
    )


def _without_times(lines: Sequence[str]) -> tuple[GpuReading, ...]:
    found: list[list[GpuSample]] = []
    for gpu in filter(None, map(_GPU.fullmatch, lines)):
        sample = _sample(gpu, "")
        if not found or sample.index <= found[-1][-1].index:
            found.append([])
        found[-1].append(sample)
    return tuple(
        GpuReading(unix=0, host="", number=number, interval_s=0, gpus=tuple(gpus))
        for number, gpus in enumerate(found, 1)
    )


def _unix(text: str) -> int | None:
    try:
        return int(datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp())
    except (ValueError, OverflowError, OSError):
        return None


def _sample(gpu: re.Match[str], host: str) -> GpuSample:
    numbers = {key: None if gpu[key] in (None, "??") else int(gpu[key]) for key in _GPUSTAT_NUMBERS}
    return GpuSample(
        index=int(gpu["index"]),
        uuid=f"{host} {gpu['index']}",
        name=gpu["name"],
        processes=None,
        clocks=None,
        fault=None,
        **numbers,
    )
