"""Figures of a cluster's GPUs and nodes that physics, a data sheet or another figure contradicts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from conf.schema.cluster import Gpu, NodeGroup

KNOWN: dict[str, tuple[float, float, float, float]] = {
    # dense fp16 TFLOPS with fp32 accumulation, GB/s and GB of memory, Gbit/s to another GPU of the node, each way
    "p100": (21.2, 732, 16, 640),
    "v100": (130, 1134, 32, 1200),
    "t4": (65, 320, 16, 128),
    "2080ti": (54, 616, 11, 400),
    "3090": (71, 936, 24, 450),
    "4090": (165, 1008, 24, 256),
    "a10": (125, 600, 24, 256),
    "a30": (165, 933, 24, 800),
    "a40": (150, 696, 48, 450),
    "a100": (312, 2039, 80, 2400),
    "l4": (121, 300, 24, 256),
    "l40s": (362, 864, 48, 256),
    "h100": (989, 3938, 96, 3600),
    "h200": (989, 4900, 144, 3600),
    "b200": (2500, 8000, 192, 7200),
    "mi250": (383, 3277, 128, 3200),
    "mi300x": (1307, 5300, 192, 3584),
}
"""The most that any variant of a GPU has, by its maker's data sheet: SXM or PCIe; NVLink where there is a bridge."""
RATE, SLOW_RATE = 1.3, 0.25
"""A peak rate, in that of the data sheet: overclocked at most, and the smallest card of that name at least. Twice the
rate is one with sparsity, or with fp16 accumulation."""
FP32 = (0.02, 0.75)
"""Rates in fp32 or TF32, and of bf16 where it is emulated, in the dense fp16 rate."""
UNKNOWN = (math.inf, 25_000.0, 512.0, 7200.0)
"""More than any GPU has that is sold; of a rate nothing is said."""
HOST_GB_PER_S = (0.25, 128.0)
"""From one lane of PCIe 1.0 to 16 of PCIe 6.0; Grace and its GPU have 450."""
WATTS = (5.0, 2000.0)
CARD_GBIT_PER_S = 1000.0
"""More than a network card of 800 Gbit/s."""
MOST_GPUS = 72
"""The largest machines have so many on one NVLink."""
LEAST_US, LIGHT_US = 0.5, 5000.0
"""A message takes a fraction of a microsecond at least, and as long as this light goes through 1,000 km of fibre."""
WIDE_GBIT_PER_S = 10.0
"""Such links do not go as far."""
DOLLARS = (0.005, 20.0)
"""An hour of a GPU: from less than its electricity to more than the largest costs on demand."""
OFTEN = 24.0
"""Failures of one node in a day: each hour."""


def node_doubts(groups: Mapping[str, NodeGroup], gpus: Mapping[str, Gpu]) -> Iterator[str]:
    """Say which figures of these groups, and of the GPUs that their nodes have, by the group's name, are hard to
    believe."""
    for key, gpu in {group.gpu: gpus[name] for name, group in groups.items()}.items():
        yield from _gpu_doubts(f"cluster.gpus.{key}", gpu)
    for name, group in groups.items():
        yield from _link_doubts(f"cluster.groups.{name}", group, gpus[name])
        yield from _group_doubts(f"cluster.groups.{name}", group, gpus[name])


def _gpu_doubts(where: str, gpu: Gpu) -> Iterator[str]:
    if gpu.is_cpu:  # from a core to a whole machine
        return
    rate, bandwidth, memory, _ = known = _known(gpu.name)
    for name, value, (low, high) in (
        ("fp16_tflops", gpu.fp16_tflops, (SLOW_RATE, RATE)),
        ("bf16_tflops", gpu.bf16_tflops, (FP32[0], RATE)),
        ("fp32_tflops", gpu.fp32_tflops, FP32),
    ):
        if known is not UNKNOWN and not low * rate <= value <= high * rate:
            yield (
                f"{where}.{name}={value:g}, but by the data sheet of {gpu.name}, {rate:g} dense TFLOPS in fp16, "
                f"{low * rate:.3g} to {high * rate:.3g} is usual; check the unit, and that it is not the rate with "
                f"sparsity"
            )
    if not (known is UNKNOWN or SLOW_RATE * bandwidth <= gpu.memory_gb_per_s) or gpu.memory_gb_per_s > RATE * bandwidth:
        yield (
            f"{where}.memory_gb_per_s={gpu.memory_gb_per_s:g}, but {bandwidth:g} GB/s is the most that the memory of "
            f"{gpu.name} has, and less than a quarter of it is not usual; check the value and its unit"
        )
    gigabytes = min([memory, *(int(size) for size in re.findall(r"(\d+) ?GB", gpu.name, re.IGNORECASE))])
    if gpu.memory_gib > gigabytes:  # of which drivers tell all, or what they leave
        yield (
            f"{where}.memory_gib={gpu.memory_gib:g}, but {gpu.name} has {gigabytes:g} at most; give the total of "
            f"nvidia-smi, MiB / 1024"
        )
    low, high = HOST_GB_PER_S
    if gpu.host_gb_per_s < low or (gpu.host_gb_per_s > high and not re.search(r"\bG[HB]\d", gpu.name)):
        yield (
            f"{where}.host_gb_per_s={gpu.host_gb_per_s:g}, but PCIe has {low:g} (1.0 x1) to {high:g} GB/s (6.0 x16) "
            f"each way; check the value and its unit"
        )
    if gpu.watts is not None and not WATTS[0] <= gpu.watts <= WATTS[1]:
        yield f"{where}.watts={gpu.watts:g}, but GPUs draw {WATTS[0]:g} to {WATTS[1]:g}; check the unit"


def _link_doubts(where: str, group: NodeGroup, gpu: Gpu) -> Iterator[str]:
    lone, fastest = group.gpus_per_node == 1, _known(gpu.name)[3]
    if not lone and group.intra_gbit_per_s > RATE * fastest:
        yield (
            f"{where}.intra_gbit_per_s={group.intra_gbit_per_s:g}, but two {gpu.name} in a node reach {fastest:g} at "
            f"most, each way; check the value, its unit and the group's gpu"
        )
    if (card := group.inter_gbit_per_s / group.nics) > CARD_GBIT_PER_S:
        yield (
            f"{where}.inter_gbit_per_s={group.inter_gbit_per_s:g} with nics={group.nics}, but no network card carries "
            f"{card:g} Gbit/s; check the unit, and give the number of cards"
        )
    if not lone and group.intra_latency_us > 10 * max(group.inter_latency_us, 100.0):
        yield (
            f"{where}.intra_latency_us={group.intra_latency_us:g}, but a message to another node takes "
            f"inter_latency_us={group.inter_latency_us:g}; check the unit of both, microseconds"
        )
    elif not lone:
        yield from latency_doubts(f"{where}.intra_latency_us", group.intra_latency_us, group.intra_gbit_per_s)
    yield from latency_doubts(f"{where}.inter_latency_us", group.inter_latency_us, group.inter_gbit_per_s)


def _group_doubts(where: str, group: NodeGroup, gpu: Gpu) -> Iterator[str]:
    gpus = group.gpus_per_node or 1
    asked = re.fullmatch(r"gpu(?::([^:,]+))?:(\d+)", group.gres or "")
    if asked and asked[1] and _listed(gpu.name) and _listed(asked[1]) not in ("", _listed(gpu.name)):
        yield (
            f"{where}.gpu={group.gpu} is {gpu.name}, but gres={group.gres} asks Slurm for another GPU; check which one "
            f"these nodes have"
        )
    if asked and group.gpus_per_node and int(asked[2]) != gpus:
        yield f"{where}.gpus_per_node={gpus}, but gres={group.gres} asks Slurm for {asked[2]} a node; make them equal"
    elif gpus > MOST_GPUS and not gpu.is_cpu:
        yield f"{where}.gpus_per_node={gpus}, but no node has more than {MOST_GPUS}; give the GPUs of one node"
    low, high = DOLLARS
    if group.price_per_hour and not gpu.is_cpu and not low <= (price := group.price_per_hour / gpus) <= high:
        yield (
            f"{where}.price_per_hour={group.price_per_hour:g} is {price:.3g} dollars for an hour of one {gpu.name}, "
            f"but usual is {low:g} to {high:g}; give the dollars of one node for one hour"
        )
    if group.failures_per_day and group.failures_per_day > OFTEN:
        yield (
            f"{where}.failures_per_day={group.failures_per_day:g}: each node would fail every "
            f"{24 * 60 / group.failures_per_day:.3g} minutes; give how often one of them does in a day"
        )


def latency_doubts(key: str, us: float, gbit_per_s: float | None) -> Iterator[str]:
    """Say why no message takes so many microseconds over such a link; 0 leaves latencies out on purpose."""
    if 0 < us < LEAST_US:
        yield f"{key}={us:g}, but messages take {LEAST_US:g} us at least; check the unit, microseconds"
    elif us > LIGHT_US and gbit_per_s is not None and gbit_per_s >= WIDE_GBIT_PER_S:
        yield (
            f"{key}={us:g} with {gbit_per_s:g} Gbit/s, but in that time light goes {us / 5:,.0f} km through a fibre; "
            f"check the unit, microseconds"
        )


def _known(name: str) -> tuple[float, float, float, float]:
    """The figures of the data sheet of a GPU with this name; parts of one have others."""
    if re.search(r"\b(MIG|vGPU|GRID)\b", name, re.IGNORECASE):
        return UNKNOWN
    return KNOWN.get(_listed(name), UNKNOWN)


def _listed(name: str) -> str:
    """The key of `KNOWN` that is in a name of a GPU; empty: none is."""
    text = re.sub(r"(?<=[a-z])[ _-]+(?=\d)", "", name.lower()).replace(" ti", "ti")
    return max((key for key in KNOWN if re.search(rf"(?<!\d){key}(?!\d)", text)), key=len, default="")
