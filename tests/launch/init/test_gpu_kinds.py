"""A node's GPUs are a shipped kind, or one made of what the driver says."""

from __future__ import annotations

import pytest

from launch.init.gpu_kinds import ASSUMED, of_figures, of_type, within_gbit_per_s
from launch.machine.gpus import GpuFigures

PUBLISHED = {
    "NVIDIA L4": ((8, 9), 7424, 2040, 6251, 192, {"fp32_tflops": 30.3, "fp16_tflops": 121, "memory_gb_per_s": 300}),
    "Tesla T4": ((7, 5), 2560, 1590, 5001, 256, {"fp32_tflops": 8.1, "fp16_tflops": 65, "memory_gb_per_s": 320}),
    "NVIDIA L40S": ((8, 9), 18176, 2520, 9001, 384, {"fp32_tflops": 91.6, "fp16_tflops": 366, "memory_gb_per_s": 864}),
    "NVIDIA A30": ((8, 0), 3584, 1440, 1215, 3072, {"fp32_tflops": 10.3, "fp16_tflops": 165, "memory_gb_per_s": 933}),
    "NVIDIA H200": ((9, 0), 16896, 1980, 3201, 6016, {"fp32_tflops": 67, "fp16_tflops": 989, "memory_gb_per_s": 4800}),
}
"""Capability, cores, MHz of cores and memory, bits of its bus, and what NVIDIA publishes."""


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", 40536, "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100_80gb"),
        ("NVIDIA A10", 22731, "a10"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100_80gb"),
        ("Tesla V100-SXM2-16GB", 16160, "v100_16gb"),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx3090"),
    ],
)
def test_a_gpu_that_is_shipped_is_taken(name: str, mib: int, key: str) -> None:
    kind = of_figures([GpuFigures(name=name, memory_mib=mib)])
    assert (kind.key, kind.shipped) == (key, key)


@pytest.mark.parametrize(("name", "mib"), [("Tesla V100-SXM2-32GB", 32510), ("NVIDIA A2", 15356)])
def test_a_gpu_with_another_name_or_memory_is_none_of_them(name: str, mib: int) -> None:
    assert of_figures([GpuFigures(name=name, memory_mib=mib)]).shipped is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_peaks_worked_out_are_near_the_published_ones(name: str) -> None:
    capability, cores, mhz, memory_mhz, bits, published = PUBLISHED[name]
    figures = GpuFigures(
        name=name,
        memory_mib=24000,
        capability=capability,
        cores=cores,
        clock_mhz=mhz,
        memory_clock_mhz=memory_mhz,
        memory_bus_bits=bits,
    )
    kind = of_figures([figures] * 2)
    values = dict(kind.values)
    assert kind.assumed == ()
    assert {key: values[key] for key in published} == {  # type: ignore[attr-defined]
        key: pytest.approx(value, rel=0.1)
        for key, value in published.items()  # type: ignore[attr-defined]
    }
    assert values["bf16_tflops"] == (values["fp16_tflops"] if capability >= (8, 0) else values["fp32_tflops"])


def test_what_the_driver_does_not_say_is_assumed_and_named() -> None:
    kind = of_figures([GpuFigures(name="NVIDIA Mystery 9", memory_mib=1024 * 10)])
    assert kind.key == "mystery_9"
    assert dict(kind.values) == {"name": "NVIDIA Mystery 9", **ASSUMED, "memory_gib": 10}
    assert kind.assumed == tuple(key for key in ASSUMED if key != "memory_gib")


def test_a_type_of_slurms_stands_for_a_shipped_kind_where_no_node_was_asked() -> None:
    assert of_type("a10").shipped == "a10"
    assert (of_type("a100").shipped, "a100_80gb" in of_type("a100").note) == ("a100_40gb", True)
    assert (of_type("titan").shipped, of_type(None).shipped) == (None, None)


def test_nvlinks_are_faster_than_pcie() -> None:
    assert within_gbit_per_s([GpuFigures(name="A100", nvlinks=12)] * 4) == 1800
    assert within_gbit_per_s([GpuFigures(name="A100", nvlinks=12), GpuFigures(name="A10")]) == 128
