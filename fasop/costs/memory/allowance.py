"""What a rank takes of its GPU beside what torch's allocator gives it: the CUDA context, and NCCL's buffers.

None of it was measured here. The sources are public: of a context, issues that say what `nvidia-smi` showed; of NCCL,
its code and issues.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import ceil

from conf.schema.cluster import Gpu
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.activations import held_scores
from fasop.costs.memory.amounts import GIB, Amount, StageMemory
from fasop.costs.sizes import shared_parameters
from fasop.costs.training import Training

MIB = 2**20
PROCESS_MIB = 512
"""A rank on a CPU takes this for Python, torch and its threads. Importing torch and a first backward pass take 245
MiB."""

KERNELS_MIB = 128
"""Kernels that are loaded when they are first used take this: a third of torch's own (pytorch/pytorch#86509, 666 MB
against 287), assumed."""

CONTEXTS: tuple[tuple[str, str, int], ...] = (
    ("Blackwell", r"\bG?B[123]00|\bRTX ?50\d\d|blackwell", 658),  # RTX PRO 6000 (local-inference-lab/rtx6kpro#42)
    ("Hopper", r"\bG?H(20|100|200|800)|hopper", 520),  # H200 (clemsgrs/slide2vec#326)
    ("Ada", r"\bL(4|20|40)S?\b|\bRTX ?40\d\d|\bada\b", 426),  # RTX 6000 Ada (unslothai/unsloth-zoo#1053)
    ("Ampere", r"\bA(2|10|16|30|40|100|800)(?!\d)|\bRTX ?(30\d\d|A\d000)|ampere", 400),  # pytorch/pytorch#109888
    ("Turing", r"\bT(4|10)\b|\bRTX ?20\d\d|turing", 400),  # as Volta
    ("Volta", r"\bV100|volta", 400),  # pytorch/pytorch#20532
    ("Pascal", r"\bP(4|40|100)\b|\bGTX ?10\d\d|pascal", 400),  # as Volta
)
"""Each row is an architecture, a GPU's name, and the MiB of a context with torch that loads kernels lazily, as since
CUDA 11.7. An unknown GPU counts as the largest."""

BEFORE_TRITON = ("Pascal",)
"""Architectures for which Triton makes no kernels: they hold the weights of attention of which some are dropped."""

CHANNEL_MIB = 10 + 2
"""What a communicator's channel takes: what a rank receives in, and what it sends from (NVIDIA/nccl#1685). The first
holds the buffers of three protocols, 4 + 4.7 + 0.5 MiB (NCCL's src/include/device.h and src/init.cc)."""

CHANNEL_GB_PER_S = 12.5
"""The bandwidth of a link that one channel serves: 24 channels on the 300 GB/s of an A100."""

LEAST_CHANNELS, MOST_CHANNELS = 2, 32
"""NCCL makes as many, however slow or fast the link is."""


def with_allowance(kind: NodeKind, training: Training, memory: StageMemory[float]) -> StageMemory[float]:
    """A stage's memory on a GPU of such a node, with what else it takes there."""
    scores = memory.buffers.fixed + _score_bytes(kind.gpu, training)
    return replace(
        memory,
        buffers=replace(memory.buffers, fixed=scores),
        context=Amount(layer=0.0, fixed=context_bytes(kind.gpu)),
        communicators=Amount(layer=0.0, fixed=communicator_bytes(kind, communicators(training))),
    )


def room_gib(kind: NodeKind, training: Training) -> float:
    """Return the GiB of such a node's GPU that are left for `fasop.costs.memory.stages.stage_memory`."""
    taken = context_bytes(kind.gpu) + communicator_bytes(kind, communicators(training))
    return kind.gpu.memory_gib - (taken + _score_bytes(kind.gpu, training)) / GIB


def context_bytes(gpu: Gpu) -> float:
    """Return the bytes of a CUDA context and the kernels in it; on a CPU, those of a rank's process."""
    return float(PROCESS_MIB * MIB if gpu.is_cpu else (_architecture(gpu.name)[1] + KERNELS_MIB) * MIB)


def communicator_bytes(kind: NodeKind, count: int) -> float:
    """Return the bytes of so many of NCCL's communicators, each of which makes a ring on the fastest link that its
    ranks may have."""
    if kind.gpu.is_cpu:
        return 0.0
    return float(count * channels(kind) * CHANNEL_MIB * MIB)


def channels(kind: NodeKind) -> int:
    """That a communicator has on nodes of a kind."""
    gb_per_s = kind.group.intra_gbit_per_s / 8 if kind.gpus > 1 else 0.0
    return min(MOST_CHANNELS, max(LEAST_CHANNELS, ceil(gb_per_s / CHANNEL_GB_PER_S)))


def communicators(training: Training) -> int:
    """Count the communicators of a rank, at most (megatron_ext/parallel/groups.py): its tensor and its data group, two
    more for sums within nodes and across, the one of the gradient's norm, one each way between stages, twice with
    chunks, and one for copies of a tied parameter.
    """
    parallel = training.parallel
    stages = parallel.pipeline
    found = (parallel.tensor_size > 1) + (parallel.data > 1) + (stages * parallel.tensor_size > 1)
    if training.reduces_by_node and parallel.data > 1:
        found += 2
    if parallel.expert > 1:  # those that share experts out, and those that sum an expert's gradients
        found += 1 + (parallel.data > parallel.expert)
    if stages > 1:
        found += (4 if parallel.chunks > 1 else 2) + (shared_parameters(training.model, 1)[0] > 0)
    return found


def _score_bytes(gpu: Gpu, training: Training) -> float:
    """Return the bytes that a GPU for which Triton makes no kernels needs beside those in `stage_memory`."""
    triton = not gpu.is_cpu and _architecture(gpu.name)[0] not in BEFORE_TRITON
    return held_scores(training, triton=triton) - held_scores(training, triton=True)


@lru_cache(maxsize=256)
def _architecture(name: str) -> tuple[str, int]:
    """Find a GPU's architecture by its name; beside it stand the MiB of its context."""
    for architecture, names, mib in CONTEXTS:
        if re.search(names, name.replace("_", " "), re.IGNORECASE):
            return architecture, mib
    return "", max(mib for _, _, mib in CONTEXTS)
