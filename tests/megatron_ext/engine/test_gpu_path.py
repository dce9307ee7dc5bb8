"""What a rank computes on a GPU, on pretended ones: the same losses, no tensor in the wrong place.

These have values, and refuse what the CUDA build of torch lets pass: to touch what a message still uses, or what
another stream has not waited for. That build itself runs in `tests/cuda`, where no kernel computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron_ext.contract.events import NAMES
from megatron_ext.engine import engine as engine_module
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.timeline import cuda_recorder
from tests.megatron_ext.engine.test_parts import RECORD
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pretended_cuda import MEMORY
from tests.support.megatron_ext.pretended_gpus import pretended_gpus
from tests.support.megatron_ext.pretended_tensors import Gpus

GPU = "cluster.gpus.cpu.name=GPU"
ONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=2")
LAYOUTS = {
    "one-rank": f"{' '.join(ONE)} profile.nsys=true profile.trace_iteration=2",
    "replicas-sharded-bf16": "parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 train.precision=bf16 "
    "parallel.sharded_optimizer=true parallel.recompute=full parallel.micro_batch_size=2",
    "tensor-gpipe": "parallel.tensor=2 parallel.data=1 parallel.pipeline=2 parallel.partition=1-2 "
    "parallel.schedule=gpipe parallel.sequence_parallel=true parallel.recompute=selective parallel.micro_batch_size=2",
    "recomputed": f"{' '.join(ONE)} parallel.recompute=full",
    "interleaved": "parallel.data=1 parallel.pipeline=2 parallel.chunks=2 parallel.partition=1-1-0-1 "
    "parallel.schedule=interleaved parallel.micro_batch_size=2",
    "zero-bubble-empty-stage": "parallel.data=1 parallel.pipeline=3 parallel.partition=1-2-0 parallel.schedule=zb_h1 "
    "parallel.micro_batch_size=2 train.precision=bf16",
}
MISTAKES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "two-devices": (lambda gpu: gpu + torch.ones(3), "same device"),
    "two-gpus": (lambda gpu: gpu + torch.ones(3, device="cuda:1"), "same device"),
    "a-gradient-elsewhere": (lambda gpu: setattr(gpu, "grad", torch.ones(3)), "different device"),
    "numbers-for-numpy": (lambda gpu: gpu.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "two-formats": (lambda gpu: F.linear(gpu.bfloat16()[None], gpu[None]), "dtype"),
    "a-copy-nobody-waits-for": (lambda gpu: gpu.to("cpu", non_blocking=True), "nobody waits for"),
    "a-gpu-too-many": (lambda _: torch.zeros(1, device="cuda:4"), "invalid device ordinal"),
    "a-message-from-the-cpu": (lambda _: dist.all_reduce(torch.ones(3)), "NCCL needs one on this rank's GPU"),
    "a-message-with-gaps": (lambda gpu: dist.all_reduce(gpu.expand(2, 3).t()), "must be contiguous"),
    "a-message-changed-on-its-way": (
        lambda gpu: (dist.all_reduce(gpu, async_op=True), gpu[1:].add_(1.0)),
        "writes to what all_reduce still uses",
    ),
    "a-message-read-before-it-came": (
        lambda gpu: (dist.all_reduce(gpu[1:], async_op=True), gpu[:2].sum()),
        "reads what all_reduce still uses",
    ),
    "another-stream-that-has-not-waited": (lambda gpu: aside(lambda: gpu.sum().item()), "has not waited"),
    "a-time-before-it-came": (lambda _: elapsed(), "device not ready"),
}


def aside(work: Callable[[], object]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        work()


def elapsed() -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()
    return first.elapsed_time(last)


@pytest.fixture(scope="module")
def losses_of_a_cpu(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> np.ndarray:
    run = make_run(tmp_path_factory.mktemp("cpu") / "run", corpus, *ONE)
    assert run.go() == 0, run.stderr()
    return run.losses()


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    """Four pretended GPUs in this process, and a rank alone with the first."""
    with pretended_gpus(forks=False) as found:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield found
        dist.destroy_process_group()


@pytest.mark.parametrize(("mistake", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_stand_in_catches(gpus: Gpus, mistake: Callable[[torch.Tensor], object], told: str) -> None:
    gpu = torch.ones(3, device="cuda")
    with pytest.raises((RuntimeError, TypeError, ValueError), match=told):
        mistake(gpu)


def test_the_process_that_forks_the_ranks_leaves_cuda_alone() -> None:
    """CUDA does not work in a process forked from one that has begun with it."""
    with pretended_gpus(), pytest.raises(RuntimeError, match="process that forks"):
        torch.cuda.device_count()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_training_on_gpus_gives_a_cpus_losses(
    layout: str,
    engine_run: Callable[..., EngineRun],
    losses_of_a_cpu: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 4096)  # so that there are several
    monkeypatch.setattr(cuda_recorder, "ANCHOR_S", 0.0)
    run = engine_run(GPU, *layout.split(), "train.log_interval=2", "train.save_interval=4", "train.checkpoint=true")
    assert run.plan.device == "cuda"
    assert run.go(pretended_gpus()) == 0, run.stderr()
    exact = run.plan.train.precision == "fp32"
    expected = losses_of_a_cpu.reshape(-1, 2).mean(1)
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5 if exact else 0.02)
    for rank in range(run.plan.world_size):
        raw = (run.run.events / f"rank-{rank:05d}.bin").read_bytes()
        records = np.frombuffer(raw[12 + int.from_bytes(raw[8:12], "little") :], RECORD)
        passes = records[records["name"] == NAMES.index("forward-compute")]
        assert len(passes) == len(expected) * 2 * run.plan.micro_batches[0] * run.plan.chunks
        assert (passes["start_ns"] <= passes["end_ns"]).all()


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_sums_by_node_on_a_stream_of_their_own_give_a_cpus_losses(
    engine_run: Callable[..., EngineRun],
    losses_of_a_cpu: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    sharded: str,
) -> None:
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 4096)
    words = ("parallel.data=4", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=2")
    run = engine_run(GPU, *words, f"parallel.sharded_optimizer={sharded}").on_nodes((0, 0, 1, 1), [0])
    assert run.go(pretended_gpus()) == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), losses_of_a_cpu, rtol=0, atol=1e-5)


def test_fp32_values_wait_on_the_host_for_an_optimizer_that_takes_its_share_of_them(gpus: Gpus) -> None:
    layer = torch.nn.Linear(3, 5)
    flat = FlatWeights(list(layer.named_parameters()), torch.bfloat16, torch.device("cuda"), shares=(1, 1, 1))
    assert [tensor.device.type for tensor in (flat.initial, flat.weight, flat.grad)] == ["cpu", "cuda", "cuda"]
    assert layer.weight.device.type == "cuda"
    torch.testing.assert_close(flat.weight.cpu(), flat.initial.bfloat16())
    assert flat.initial.any()


def test_an_overflow_under_the_loss_scale_is_skipped_and_memory_is_told_by_its_kind(
    engine_run: Callable[..., EngineRun],
) -> None:
    run = engine_run(GPU, *ONE, "train.precision=fp16", "train.iterations=2", "train.checkpoint=false")
    assert run.go(pretended_gpus()) == 0, run.stderr()
    assert [line["skipped"] for line in run.metrics()] == [1, 1]
    told = json.loads((run.run.path / "memory" / "rank-00000.json").read_text())["mib"]
    assert told == {name.replace("memory_", ""): size for name, size in MEMORY.items()}


def test_a_checkpoint_of_gpus_is_taken_up_by_others_in_another_layout(
    engine_run: Callable[..., EngineRun], losses_of_a_cpu: np.ndarray
) -> None:
    half = ("train.iterations=2", "train.lr_decay_iterations=4", "train.save_async=true", "train.checkpoint=true")
    first = engine_run(GPU, "parallel.data=2", "parallel.pipeline=1", "parallel.partition=3", *half)
    assert first.go(pretended_gpus()) == 0, first.stderr()
    tensor = ("parallel.tensor=2", "parallel.data=1", "parallel.pipeline=1", "parallel.partition=3")
    second = first.replan(GPU, *tensor, "parallel.sharded_optimizer=true")
    assert second.go(pretended_gpus()) == 0, second.stderr()
    np.testing.assert_allclose(second.losses(), losses_of_a_cpu, rtol=0, atol=1e-5)
