"""Wrong figures of a cluster are doubted with their key and value, and no cluster that exists is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import conf
from conf.schema.cluster import Gpu, NodeGroup
from conf.schema.values.links import PairLink
from fasop.costs.hardware_doubts import node_doubts
from fasop.costs.network.link_doubts import link_doubts
from fasop.search.inputs import read
from tests.support.fasop.plans import mixed

CLUSTER = mixed().cluster


def said(group: NodeGroup, gpu: Gpu) -> list[str]:
    return [*node_doubts({"gpu2": group}, {"gpu2": gpu}), *link_doubts({"gpu2": group}, {})]


def wrong(key: str, value: object) -> list[str]:
    """Doubts about the seed's cluster with one other value."""
    owner, _, name = key.partition(".")
    groups, gpus = dict(CLUSTER.groups), dict(CLUSTER.gpus)
    if owner in groups:
        groups[owner] = replace(groups[owner], **{name: value})  # type: ignore[arg-type]
    else:
        gpus[owner] = replace(gpus[owner], **{name: value})  # type: ignore[arg-type]
    of_groups = {name: gpus[group.gpu] for name, group in groups.items()}
    return [*node_doubts(groups, of_groups), *link_doubts(groups, {})]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu2.intra_gbit_per_s", 1840.0),  # the other group's
        ("gpu2.intra_gbit_per_s", 16.0),  # GB/s
        ("gpu2.inter_gbit_per_s", 40_000.0),  # Mbit/s
        ("hgx.inter_gbit_per_s", 3200.0),  # of eight cards
        ("hgx.inter_gbit_per_s", 0.04),  # Tbit/s
        ("gpu2.intra_latency_us", 0.01),  # ms
        ("gpu2.inter_latency_us", 0.02),
        ("gpu2.inter_latency_us", 20_000.0),  # ns
        ("hgx.intra_latency_us", 5000.0),
        ("a10.memory_gib", 22_732.0),  # MiB
        ("a100_40gb.memory_gib", 80.0),
        ("a10.fp16_tflops", 0.125),  # PFLOPS
        ("a10.fp16_tflops", 125_000.0),  # GFLOPS
        ("a100_40gb.fp16_tflops", 624.0),  # with sparsity
        ("a100_40gb.bf16_tflops", 0.312),
        ("a10.fp32_tflops", 31_200.0),
        ("a10.fp32_tflops", 0.0312),
        ("a10.memory_gb_per_s", 0.6),  # TB/s
        ("a10.memory_gb_per_s", 4800.0),  # Gbit/s
        ("a10.host_gb_per_s", 192.0),
        ("a10.host_gb_per_s", 0.024),
        ("a10.watts", 0.15),  # kW
        ("a10.watts", 150_000.0),
        ("hgx.gpu", "a10"),
        ("gpu2.gpu", "a100_40gb"),
        ("gpu2.gpus_per_node", 8),
        ("gpu2.gpus_per_node", 1),
        ("gpu2.price_per_hour", 195.5),  # a day
        ("gpu2.price_per_hour", 0.0023),  # a second
        ("gpu2.failures_per_day", 65.0),  # of ten thousand
    ],
)
def test_a_wrong_value_is_doubted_with_its_key(key: str, value: object) -> None:
    owner, _, name = key.partition(".")
    found = wrong(key, value)
    figure = f"{value:g}" if not isinstance(value, str) else value
    assert any(re.search(rf"cluster\.\w+\.{owner}\.{name}={re.escape(figure)}\b", one) for one in found), found


def gpu(name: str, gib: float, fp32: float, fp16: float, bf16: float, gb_per_s: float, host: float = 24.0) -> Gpu:
    return Gpu(
        name=name, memory_gib=gib, fp32_tflops=fp32, fp16_tflops=fp16, bf16_tflops=bf16, memory_gb_per_s=gb_per_s,
        host_gb_per_s=host,
    )  # fmt: skip


def nodes(
    gpus: int, intra: float, inter: float, us: float = 20.0, cards: int = 1, price: float | None = None
) -> NodeGroup:
    return NodeGroup(
        count=2, gpus_per_node=gpus, gpu="x", intra_gbit_per_s=intra, intra_latency_us=8.0, inter_gbit_per_s=inter,
        inter_latency_us=us, nics=cards, price_per_hour=price,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "group"),
    [
        (gpu("RTX3090", 23.69, 35.6, 71, 71, 936), nodes(2, 100, 1, 50)),
        (gpu("NVIDIA A100-SXM4-80GB", 80.0, 19.5, 312, 312, 2039), nodes(8, 2400, 400, 30, 4)),  # all of its memory
        (gpu("NVIDIA GeForce RTX 3090", 24.0, 35.6, 71, 71, 936), nodes(2, 100, 1, 50)),
        (gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, 2.8, 44.6, 44.6, 222), nodes(7, 100, 25)),
        (gpu("GTX 1080 Ti", 10.9, 11.3, 0.177, 11.3, 484, 12), nodes(2, 100, 1, 50)),
        (gpu("RTX 2080 Ti", 10.7, 13.4, 53.8, 13.4, 616, 12), nodes(4, 90, 10)),
        (gpu("NVIDIA GeForce RTX 4090", 23.6, 82.6, 165, 165, 1008), nodes(8, 200, 10, 50)),
        (gpu("RTX3080", 9.7, 29.8, 59.5, 59.5, 760, 0.98), nodes(8, 7, 1, 100)),
        (gpu("RTX3060", 11.8, 12.7, 51, 51, 360, 12), nodes(1, 100, 0.05, 40_000)),
        (gpu("NVIDIA A100-SXM4-40GB", 39.5, 19.5, 312, 312, 1555), nodes(8, 2400, 400, 30, 4, 32.77)),
        (gpu("NVIDIA A100 80GB PCIe", 79.1, 156, 312, 312, 1935), nodes(4, 200, 100, 5)),
        (gpu("NVIDIA H100 80GB HBM3", 79.1, 494, 989, 989, 3350, 50), nodes(8, 3600, 3200, 30, 8, 98.32)),
        (gpu("NVIDIA H100 PCIe", 79.1, 51, 756, 756, 2000, 50), nodes(8, 480, 400, 5)),
        (gpu("NVIDIA H200", 140, 67, 989, 989, 4800, 55), nodes(8, 3600, 3200, 3, 8)),
        (gpu("NVIDIA B200", 179, 80, 2250, 2250, 8000, 55), nodes(8, 7200, 3200, 3, 8, 113.9)),
        (gpu("NVIDIA GH200 480GB", 94.5, 67, 989, 989, 4000, 450), nodes(1, 3600, 200, 3)),
        (gpu("NVIDIA GB200", 185, 80, 2500, 2500, 8000, 450), nodes(72, 7200, 14_400, 3, 36)),
        (gpu("AMD Instinct MI250X", 63.9, 47.9, 191.5, 191.5, 1638, 36), nodes(8, 800, 800, 5, 4)),
        (gpu("MI300X", 191, 163, 1307, 1307, 5300, 55), nodes(8, 512, 3200, 5, 8)),
        (gpu("Tesla V100-PCIE-32GB", 31.7, 14, 112, 14, 900, 12), nodes(4, 96, 25)),
        (gpu("Tesla T4", 14.6, 8.1, 65, 8.1, 320, 12), nodes(4, 80, 50, 30, 1, 3.912)),
        (gpu("NVIDIA L4", 22.0, 30.3, 121, 121, 300), nodes(8, 200, 100, 30, 1, 6.67)),
        (gpu("NVIDIA L40S", 44.5, 91.6, 362, 362, 864), nodes(8, 200, 400, 5, 2)),
        (gpu("NVIDIA A10G", 22.3, 35, 70, 70, 600), nodes(4, 100, 40, 30, 1, 5.672)),
        (gpu("Tesla K80", 11.2, 4.1, 4.1, 4.1, 240, 10), nodes(16, 80, 20, 30, 1, 14.4)),
        (gpu("Tesla P100", 15.9, 9.3, 18.7, 9.3, 732, 12), nodes(4, 80, 32, 1.7)),
        (gpu("RTX A4000", 15.7, 19.2, 76.7, 76.7, 448, 24), nodes(2, 200, 10)),
        (gpu("Orin", 30, 5.3, 85, 85, 204.8, 12), nodes(1, 100, 1, 100)),
        (gpu("CPU", 256, 4, 4, 50, 300), nodes(2, 400, 25)),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)  # fmt: skip
def test_clusters_that_exist_are_not_doubted(device: Gpu, group: NodeGroup) -> None:
    assert said(group, device) == []


SHIPPED = sorted(path.stem for path in (Path(conf.__file__).parent / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_clusters_are_not_doubted(name: str) -> None:
    cluster = read([f"cluster={name}", "cluster.groups.local.gpus_per_node=4"][: 1 + (name == "local")], None).cluster
    assert [*node_doubts(cluster.groups, {name: cluster.gpus[own.gpu] for name, own in cluster.groups.items()})] == []


def test_latencies_and_rates_of_pairs_are_doubted_too() -> None:
    groups = {"a": nodes(1, 100, 40), "b": nodes(1, 100, 40)}

    def between(**values: float) -> list[str]:
        link = PairLink(**values)  # type: ignore[arg-type]
        return [*link_doubts(groups, {("a", "b"): link, ("b", "a"): link})]

    assert between(gbit_per_s=40, latency_us=500) == between(gbit_per_s=0.05, latency_us=90_000) == []
    assert "latency_us=0.02, but messages take" in between(gbit_per_s=40, latency_us=0.02)[0]
    assert "light goes 100,000 km" in between(gbit_per_s=40, latency_us=500_000)[0]
    assert "0.0004 Gbit/s, less than a telephone line" in between(gbit_per_s=0.0004)[0]
