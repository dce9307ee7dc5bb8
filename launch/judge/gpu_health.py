"""What the GPUs of a run say about it: whether its ranks are on them, and whether they compute or only wait.

A run that hangs often looks busy: a kernel of NCCL that waits for another GPU keeps its own at full utilisation, but
at little power. An H100 of 700 W was seen at 100 W so, and at 500 to 690 W at work (github.com/NVIDIA-NeMo/Speech,
issue 9291). That happens for moments in every run: these rules are for one that has logged nothing for long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from conf.run_folder.gpu_lines import GpuSample, GpuTrouble
from conf.visible import plural
from launch.observe.observation import READINGS, NodeGpus

GRACE_S = 300
"""Until a rank must be on its GPU, or the run log something: it imports torch, opens data, meets the others first."""
FULL = 95
"""Percent of utilisation from which a GPU counts as full."""
EMPTY = 5
"""Percent up to which nothing runs on it."""
LITTLE_POWER = 0.5
"""The share of its power limit above which a GPU computes."""


def hang(nodes: Sequence[NodeGpus], now: float, logged_unix: float | None) -> tuple[str, str] | None:
    """Rule and reason by which a run hangs that has logged nothing for long; None if nothing says so.

    `nodes` are all of the run; `logged_unix` is when it last logged, None if it never did.
    """
    current = [node for node in nodes if len(node.readings) >= READINGS and node.age_s(now) is None]
    lost = list(_always(current, lambda gpu: gpu.fault is not None))
    if lost:
        return "gpu-lost", f"{_places(lost)} can no longer be read: {lost[0][1].fault}; no iteration is logged"
    settled = [node for node in current if _is_settled(node, logged_unix)]
    unused = list(_always(settled, _is_unused))
    if unused:
        return "gpu-idle", f"no process of the run uses {_places(unused)}, and no iteration is logged"
    return _waits(settled) if len(settled) == len(nodes) else None


def _waits(nodes: Sequence[NodeGpus]) -> tuple[str, str] | None:
    """Every GPU of the run waits or has nothing to do: nobody is left to be waited for."""
    waiting = list(_always(nodes, _is_waiting))
    resting = list(_always(nodes, _is_resting))
    count = sum(len(node.readings[-1].gpus[: node.ranks]) for node in nodes)
    if not waiting or len(waiting) + len(resting) < count:
        return None
    sample = waiting[0][1]
    reason = (
        f"{len(waiting)} of {plural(count, 'GPU')} only wait (full utilisation, but little power: "
        f"{sample.power_w} of {sample.power_limit_w} W), and no iteration is logged"
    )
    return "gpu-spin", reason + (f"; idle: {_places(resting)}" if resting else "")


def summary(node: NodeGpus, now: float) -> str | None:
    """A node's GPUs in a few words; None where nothing was read of them."""
    if not node.entries:
        return None
    last = node.entries[-1]
    if isinstance(last, GpuTrouble):
        return last.text
    age = node.age_s(now)
    if age is not None:
        return f"no reading for {age:.0f} s: the driver does not answer"
    gpus = last.gpus[: node.ranks]
    parts = [f"GPU {gpu.index}: {gpu.fault}" for gpu in gpus if gpu.fault is not None]
    if all(gpu.processes is not None for gpu in gpus):
        parts.append(f"{sum(not _is_unused(gpu) for gpu in gpus)} of {node.ranks} busy")
    used = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    if used:
        parts.append(f"{statistics.mean(used):.0f} % mean")
    memory = [
        (gpu.memory_used_mib / gpu.memory_total_mib, gpu.memory_used_mib, gpu.memory_total_mib)
        for gpu in gpus
        if gpu.memory_used_mib is not None and gpu.memory_total_mib
    ]
    if memory:
        _, fullest, total = max(memory)
        parts.append(f"fullest {fullest / 1024:.1f}/{total / 1024:.1f} GiB")
    return ", ".join(parts)


def _always(nodes: Sequence[NodeGpus], holds: Callable[[GpuSample], bool]) -> Iterator[tuple[str, GpuSample]]:
    """The GPUs of the plan for which it holds in each of the last readings, with their nodes."""
    for node in nodes:
        for samples in zip(*(reading.gpus[: node.ranks] for reading in node.readings[-READINGS:]), strict=False):
            if all(map(holds, samples)):
                yield node.node, samples[-1]


def _is_unused(gpu: GpuSample) -> bool:
    """Whether certainly no process of the run is on it."""
    return gpu.processes is not None and all(process.ours is False for process in gpu.processes)


def _at_little_power(gpu: GpuSample) -> bool:
    return bool(gpu.power_w is not None and gpu.power_limit_w and gpu.power_w <= LITTLE_POWER * gpu.power_limit_w)


def _is_waiting(gpu: GpuSample) -> bool:
    return _at_little_power(gpu) and gpu.utilisation is not None and gpu.utilisation >= FULL


def _is_resting(gpu: GpuSample) -> bool:
    return _at_little_power(gpu) and gpu.utilisation is not None and gpu.utilisation <= EMPTY


def _is_settled(node: NodeGpus, logged_unix: float | None) -> bool:
    """Whether its ranks have had the time to come to their GPUs, or have been there already since the run started."""
    last = node.readings[-1]
    sampled_s = (last.number - 1) * last.interval_s
    return sampled_s > GRACE_S or (logged_unix is not None and logged_unix > last.unix - sampled_s)


def _places(gpus: Sequence[tuple[str, GpuSample]]) -> str:
    """Names places, such as `GPU 2 of a-0 and 6 others`."""
    (node, gpu), *others = gpus
    more = f" and {plural(len(others), 'other')}" if others else ""
    return f"GPU {gpu.index} of {node}{more}"
