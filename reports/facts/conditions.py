"""What on the hosts of a run makes its times uncertain: shared cores, other processes, throttled GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from conf.run_folder.gpu_lines import WAYS_OUT
from conf.run_folder.rank_ranges import rank_ranges
from conf.visible import plural
from megatron_ext.contract.plan import Plan
from reports.facts.statistics import Statistics
from reports.readers.events import Timeline
from reports.readers.gpus import GpuReport

WAITS = 0.02
"""Of an iteration, from which a rank's wait for a core is reported."""
AT_LIMIT = 0.97
"""Of its power limit, from which a GPU is slowed by it."""
OFTEN = 0.05
"""Of a GPU's readings, from which a reason for lower clocks is reported."""


def conditions(timeline: Timeline, plan: Plan, figures: Statistics, gpus: GpuReport | None) -> list[str]:
    """A sentence for each host and GPU of which there is something to say. A rehearsal computes nothing."""
    if plan.rehearsal is not None:
        return []
    waits = core_waits(timeline, figures)
    hosts: dict[str, list[int]] = {}
    for rank, host in timeline.hosts.items():
        hosts.setdefault(host, []).append(rank)
    return [said for host, ranks in hosts.items() if (said := _host(timeline, host, ranks, waits))] + [
        *(_gpus(gpus) if gpus is not None else ())
    ]


def core_waits(timeline: Timeline, figures: Statistics) -> dict[int, float]:
    """By rank of which it is known, the part of an iteration for which it waits for a CPU core: the median over the
    steady iterations."""
    periods = dict(
        zip(figures.iterations[figures.steady].tolist(), figures.period_ns[figures.steady].tolist(), strict=True)
    )
    waits = timeline.core_waits
    steady = waits[waits["iteration"].isin(periods.keys())]
    shares = steady["ns"] / steady["iteration"].map(periods)
    return {int(rank): float(np.median(own)) for rank, own in shares.groupby(steady["rank"])}


def _host(timeline: Timeline, host: str, ranks: list[int], waits: Mapping[int, float]) -> str:
    cores, load = timeline.cores.get(host), timeline.load.get(host)
    long = {rank: waits[rank] for rank in ranks if waits.get(rank, 0.0) > WAITS}
    shared = cores is not None and len(ranks) > cores
    if not shared and not long:
        return ""
    said = f"Other processes compute on the CPU cores of {host}"
    if cores is not None and shared:
        said = f"{plural(len(ranks), 'rank')} share {plural(cores, 'CPU core')} of {host}"
    if cores is not None and load is not None and shared and load > cores:
        said += f" with other processes (load average {load:.1f} when they began)"
    if long:
        most = max(long, key=lambda rank: long[rank])
        which = "ranks" if len(long) == len(ranks) > 1 else f"rank{'s' if len(long) > 1 else ''} {rank_ranges(long)}"
        up_to = "up to " if len(long) > 1 else ""
        said += f"; {which} wait{'s' if len(long) == 1 else ''} for a core for {up_to}{long[most]:.0%} of an iteration"
    return f"{said}."


def _gpus(gpus: GpuReport) -> Iterator[str]:
    for (node, index), reasons in gpus.throttled.items():
        reason, share = next(((reason, share) for reason, share in reasons.items() if share >= OFTEN), (None, 0.0))
        if reason is not None:
            said = f"GPU {index} of {node} lowers its clocks in {share:.0%} of its readings: {reason}"
            yield f"{said}; {WAYS_OUT[reason]}."
    for node, own in gpus.uses.groupby("node", sort=False):
        limited = own["index"][own["power_w"] >= AT_LIMIT * own["power_limit_w"]].tolist()
        if len(limited) > 1:
            yield f"GPUs {rank_ranges(limited)} of {node} run at their power limits."
        elif limited:
            yield f"GPU {limited[0]} of {node} runs at its power limit."
    for node, numbers in gpus.shared.items():
        yield f"Other processes compute on GPU{'s' if len(numbers) > 1 else ''} {rank_ranges(numbers)} of {node}."
