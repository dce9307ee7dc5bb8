"""Which kind of GPU a node has: a shipped configuration where one fits, else one made of the driver's figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from omegaconf import OmegaConf

from conf.reading.own_folders import SHIPPED, SUFFIX
from launch.machine.gpus import GpuFigures
from launch.machine.sinfo import PART

LIKE = 1.06
"""A GPU's memory is another one's if they differ by no more than this factor."""
CPU = "cpu"
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
"""Words that are no text to YAML, and so no names of groups."""
TENSOR_RATES = {
    **dict.fromkeys([(7, 0), (7, 2), (7, 5)], 8),
    (8, 0): 16,
    **dict.fromkeys([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], 4),
    (9, 0): 16,
    **dict.fromkeys([(10, 0), (10, 3)], 32),
}
"""How many times the rate of fp32 that of dense 16-bit matrix products is, by compute capability, after
NVIDIA's white papers of each architecture. A data sheet has lower figures where a card's clock is lower under load."""
BF16_SINCE = (8, 0)
ASSUMED = {"memory_gib": 16.0, "fp32_tflops": 10.0, "fp16_tflops": 40.0, "bf16_tflops": 40.0, "memory_gb_per_s": 400.0}
"""What a GPU is taken for of which nothing is known: an ordinary one of recent years."""
NVLINK_GBIT_PER_S = 150.0
"""The rate of one link in a direction: three quarters of the 200 of its wires, as is measured of messages."""
PCIE_GBIT_PER_S = 128.0
"""The rate of the shipped nodes of four A10."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """What `cluster.gpus.<key>` is to be."""

    key: str
    shipped: str | None = None
    """The name of a shipped configuration, which has all of it."""
    values: tuple[tuple[str, str | float], ...] = ()
    """Else its keys, in their order."""
    assumed: tuple[str, ...] = ()
    """Keys that nobody has said."""
    note: str = ""
    """What is to be checked."""
    name: str = ""
    """The name that the driver gives it, or else Slurm."""


PARTS_APART = (
    "parts of GPUs (MIG): NCCL does not connect several parts of one GPU, so a plan with several ranks on a GPU "
    "may not start; ask your administrator for whole GPUs"
)

ON_CPU = GpuKind(key=CPU, shipped=CPU, name="CPU")


def of_figures(gpus: Sequence[GpuFigures], gres: str | None = None) -> GpuKind:
    """The kind of the GPUs that a type of gres names, or else of the first one; `note` names the node's other kinds."""
    first = next((gpu for gpu in gpus if gres is not None and _parts(gres) <= _parts(gpu.name)), gpus[0])
    others = sorted({gpu.name for gpu in gpus} - {first.name})
    note = f"{', '.join(others)} on the same node counts as {first.name}" if others else ""
    found = _shipped(first)
    if found is not None:
        return GpuKind(key=found, shipped=found, note=note, name=first.name)
    known = _rates(first)
    values: dict[str, str | float] = {
        "name": first.name,
        **{key: known.get(key, value) for key, value in ASSUMED.items()},
    }
    return GpuKind(
        key=_key(first.name),
        values=tuple(values.items()),
        assumed=tuple(key for key in ASSUMED if key not in known),
        note=note,
        name=first.name,
    )


def of_type(gres: str | None) -> GpuKind:
    """The kind that the type of a gres stands for, where no node could be asked."""
    fitting = [] if gres is None else [name for name in _shipped_kinds() if _may_be(gres, name)]
    if fitting:
        note = f"no node was asked: by the name that Slurm gives it, it may be {' or '.join(fitting)}"
        return GpuKind(key=fitting[0], shipped=fitting[0], note=note, name=str(gres))
    name = gres or "GPU"
    part = PART.search(name)
    known = {} if part is None or part[1] is None else {"memory_gib": float(part[1])}
    return GpuKind(
        key=_key(name),
        values=(("name", name), *(ASSUMED | known).items()),
        assumed=tuple(key for key in ASSUMED if key not in known),
        note="no node was asked" if part is None else PARTS_APART,
        name=name,
    )


def _may_be(gres: str, shipped: str) -> bool:
    """Whether the type of a gres names a shipped kind, in fewer words (a100) or more (nvidia_h100_80gb_hbm3)."""
    words, kind = _parts(gres), _parts(shipped)
    return shipped != CPU and PART.search(gres) is None and (words <= kind or kind <= words)


def within_gbit_per_s(gpus: Sequence[GpuFigures]) -> float:
    """Returns the rate between two GPUs of a node."""
    links = min((gpu.nvlinks for gpu in gpus), default=0)
    return links * NVLINK_GBIT_PER_S if links else PCIE_GBIT_PER_S


def _shipped(gpu: GpuFigures) -> str | None:
    for name, (called, memory_gib) in _shipped_kinds().items():
        same = gpu.memory_mib is None or 1 / LIKE <= gpu.memory_mib / 1024 / memory_gib <= LIKE
        if same and _parts(called) <= _parts(gpu.name):
            return name
    return None


@cache
def _shipped_kinds() -> dict[str, tuple[str, float]]:
    """Name and memory by the name of the configuration, the smallest memory first."""
    found = {}
    for file in sorted((SHIPPED / "gpu").glob(f"*{SUFFIX}")):
        content = OmegaConf.load(file)
        found[file.stem] = (str(content.name), float(content.memory_gib))
    return dict(sorted(found.items(), key=lambda item: item[1][1]))


def _rates(gpu: GpuFigures) -> dict[str, float]:
    """Peaks, from cores and clocks: a core multiplies and adds once a cycle; memory has two transfers a cycle."""
    found = {}
    if gpu.memory_mib is not None:
        found["memory_gib"] = round(gpu.memory_mib / 1024, 2)
    if gpu.memory_clock_mhz and gpu.memory_bus_bits:
        found["memory_gb_per_s"] = _three_digits(2 * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8 / 1e9)
    if gpu.cores and gpu.clock_mhz:
        fp32 = 2 * gpu.cores * gpu.clock_mhz * 1e6 / 1e12
        found["fp32_tflops"] = _three_digits(fp32)
        if gpu.capability is not None:
            faster = TENSOR_RATES.get(gpu.capability, 1 if gpu.capability < (7, 0) else 4)
            found["fp16_tflops"] = _three_digits(faster * fp32)
            found["bf16_tflops"] = _three_digits((faster if gpu.capability >= BF16_SINCE else 1) * fp32)
    return found


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _key(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", name.lower()))
