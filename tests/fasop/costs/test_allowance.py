"""What a rank takes of a GPU beside its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema.experiment import Gpu, Schedule
from fasop.costs.hardware import NodeKind
from fasop.costs.memory import allowance
from fasop.costs.memory.allowance import KERNELS_MIB, MIB, PROCESS_MIB, channels, communicators, context_bytes, room_gib
from fasop.costs.memory.amounts import GIB
from fasop.simulation.predict import predict
from tests.support.fasop.plans import experiment, kinds, training


def gpu(name: str) -> Gpu:
    return Gpu(name=name, memory_gib=16, fp32_tflops=10, fp16_tflops=20, bf16_tflops=20, memory_gb_per_s=700)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        *(("NVIDIA H100 80GB HBM3", 520), ("H100-80GB", 520), ("NVIDIA GH200 480GB", 520), ("NVIDIA H200", 520)),
        *(("NVIDIA B200", 658), ("NVIDIA GB200", 658), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 658)),
        *(("NVIDIA L4", 426), ("NVIDIA L40S", 426), ("NVIDIA RTX 6000 Ada Generation", 426)),
        *(("A10", 400), ("A100-40GB", 400), ("NVIDIA A100-SXM4-80GB", 400), ("a100_1g.5gb", 400), ("RTX3090", 400)),
        *(("NVIDIA RTX A6000", 400), ("Tesla T4", 400), ("V100-16GB", 400), ("Tesla P100-PCIE-16GB", 400)),
        ("NVIDIA Mystery 9", 658),
    ],
)
def test_a_context_is_that_of_the_architecture_or_of_the_largest(name: str, mib: int) -> None:
    assert context_bytes(gpu(name)) == (mib + KERNELS_MIB) * MIB


def test_a_rank_on_a_cpu_is_a_process_without_communicators() -> None:
    one = on(gpu("CPU fast"), intra=2400, gpus=8)
    assert context_bytes(one.gpu) == PROCESS_MIB * MIB
    assert room_gib(one, training(data=4)) == 16 - PROCESS_MIB / 1024


def on(of: Gpu, *, intra: float, gpus: int) -> NodeKind:
    (kind,) = kinds(experiment())
    return replace(kind, gpu=of, gpus=gpus, group=replace(kind.group, intra_gbit_per_s=intra))


@pytest.mark.parametrize(
    ("gbit_per_s", "gpus", "found"),
    [(2400, 8, 24), (3600, 8, 32), (128, 4, 2), (252, 8, 3), (2400, 1, 2)],
    ids=["A100", "H100", "PCIe", "PCIe-4", "one-a-node"],
)
def test_a_communicator_has_channels_for_its_fastest_link(gbit_per_s: float, gpus: int, found: int) -> None:
    assert channels(on(gpu("A10"), intra=gbit_per_s, gpus=gpus)) == found


@pytest.mark.parametrize(
    ("words", "sizes", "found"),
    [
        ((), {"pipeline": 1, "data": 1}, 0),
        ((), {"pipeline": 1, "data": 4}, 1),
        ((), {"pipeline": 1, "data": 1, "tensor": 4}, 2),  # its own, and the norm's
        (("parallel.hierarchical_reduce=true",), {"pipeline": 1, "data": 4}, 3),  # a node's, and one across
        ((), {"pipeline": 8, "data": 1}, 4),  # the norm, two ways, the tied words
        (("model.untie_embeddings_and_output_weights=true",), {"pipeline": 8, "data": 4}, 4),
        ((), {"pipeline": 4, "data": 4, "tensor": 2, "chunks": 2, "schedule": Schedule.interleaved}, 8),
    ],
    ids=["one", "replicas", "tensor", "by-node", "stages", "untied", "all"],
)
def test_a_rank_is_in_as_many_communicators_as_it_has_groups(
    words: tuple[str, ...], sizes: dict[str, Any], found: int
) -> None:
    assert communicators(training(*words, **sizes)) == found


def test_without_tritons_kernels_attention_with_dropout_holds_its_weights() -> None:
    one = training("model.attention_dropout=0.1", micro_batch_size=2)
    model = one.model
    weights = 14 * 2 * model.heads * model.sequence_length**2
    with_kernels, without = (room_gib(on(gpu(name), intra=128, gpus=4), one) for name in ("V100", "P100"))
    assert with_kernels - without == pytest.approx(weights / GIB)


def test_a_stage_is_shown_with_the_parts_of_its_allowance() -> None:
    one = experiment()
    (kind,) = kinds(one)
    for stage in predict(one).stages:
        parts = {name: amount.of(sum(stage.layers)) / GIB for name, amount in stage.memory.by_term().items()}
        assert sum(parts.values()) == pytest.approx(stage.memory_gib)
        anyway = parts["context"] + parts["communicators"]
        assert room_gib(kind, training()) == pytest.approx(kind.gpu.memory_gib - anyway)
        assert parts["context"] == pytest.approx((400 + allowance.KERNELS_MIB) / 1024)
