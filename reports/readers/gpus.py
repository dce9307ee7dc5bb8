"""What the GPUs of a run did, from the readings in `nodes/<node>.gpu`, or in what gpustat left of an older job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from conf.errors import RunFolderError
from conf.run_folder.gpu_lines import WAYS_OUT, GpuSample, GpuTrouble, entries
from conf.run_folder.run_files import read_tail
from conf.run_folder.rundir import RunDir
from reports.readers import gpustat
from reports.readers.record import Record

BYTES = 16 << 20
"""Read of all files together, of each its end, so that a report does not take minutes after weeks of readings."""
LEAST_BYTES = 64 << 10
USE = (
    *("node", "index", "name", "utilisation", "power_w", "power_limit_w", "memory_mib", "memory_total_mib"),
    *("temperature_c", "fault"),
)
_NUMBERS = ("utilisation", "power_w", "power_limit_w", "memory_used_mib", "memory_total_mib", "temperature_c")


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    uses: pd.DataFrame
    """USE of a GPU a row, over the readings that were looked at. Utilisation, percent, and power are medians over the
    readings in which a process of the run computed on it, else over all; memory and temperature are the most. A figure
    that it never reported is missing."""
    course: pd.DataFrame
    """By hours since the first reading that was looked at: `utilisation`, percent, the mean over all GPUs, and
    `power_w`, their sum. Empty where readings have no times."""
    shared: Mapping[str, Sequence[int]]
    """By node, the GPUs on which processes that are not of the run computed beside those of the run."""
    throttled: Mapping[tuple[str, int], Mapping[str, float]]
    """By node and index of a GPU that heat, its power supply or its hardware slowed (`WAYS_OUT`): the part of its
    readings with each such reason, of those in which a process of the run computed on it, else of all."""
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
    rows, troubles, shared = [], dict[str, list[str]](), dict[str, set[int]]()
    for node, text in texts.items():
        for one in entries(text) or gpustat.readings(text):
            if isinstance(one, GpuTrouble):
                troubles.setdefault(one.text, []).append(node)
                continue
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
    """Those in which a process of the run computed on the GPU; of a GPU that none was ever seen on, all."""
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


def _course(samples: pd.DataFrame, most: int = 200) -> pd.DataFrame:
    """Of at most so many spans of equal length."""
    timed = samples.assign(
        unix=[one.unix for one in samples["reading"]], interval_s=[one.interval_s for one in samples["reading"]]
    )
    timed = timed[timed["interval_s"] > 0]
    begin, end = timed["unix"].min(), timed["unix"].max()
    span = max((end - begin) / most, timed["interval_s"].max(), 1) if len(timed) else 1
    hours = ((timed["unix"] - begin) // span + 0.5) * span / 3600
    usual = timed.groupby([hours.rename("hours"), "uuid"])[["utilisation", "power_w"]].median()
    by_hours = usual.groupby("hours")
    power_w = by_hours["power_w"].agg(lambda watts: watts.sum(skipna=False))
    return pd.DataFrame({"utilisation": by_hours["utilisation"].mean(), "power_w": power_w})
