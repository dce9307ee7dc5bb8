"""engine=megatron_core on GPUs: every layout comes to its end, with Megatron-Core's own kernels and messages.

Megatron-Core is the one of the tests' own venv, which stands behind the CUDA build's packages.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reports.readers.events import read_run
from tests.support.cuda.machine import WORKER, Machine, counts
from tests.support.megatron_ext.engine_run import make_corpus, make_run

megatron = pytest.importorskip("megatron", reason="megatron-core is not installed")

BESIDE = {"BESIDE": str(Path(megatron.__path__[0]).parent)}
GPU = "cluster.gpus.cpu.name=GPU"
ONE, STAGES = "parallel.data=1 parallel.pipeline=1 parallel.partition=3", "parallel.data=1 parallel.pipeline=2"
TENSOR = "parallel.tensor=2 parallel.sequence_parallel=true"
INTERLEAVED = "parallel.chunks=2 parallel.partition=1-1-0-1 parallel.schedule=interleaved"
REPLICAS = "parallel.data=2 parallel.pipeline=1 parallel.partition=3"
LAYOUTS: dict[str, tuple[int, str, set[str]]] = {
    "single": (1, ONE, set()),
    "bf16": (1, f"{ONE} train.precision=bf16", set()),
    "fp16": (1, f"{ONE} train.precision=fp16", set()),
    "dropout": (1, f"{ONE} model.hidden_dropout=0.1 model.attention_dropout=0.1", set()),
    "recomputed": (1, f"{ONE} parallel.recompute=full", set()),
    "evaluated": (1, f"{ONE} train.eval_interval=2 train.eval_iterations=1", set()),
    "1f1b": (2, f"{STAGES} parallel.partition=1-2", {"send", "recv"}),
    "interleaved": (2, f"{STAGES} {INTERLEAVED}", {"send", "recv"}),
    "tensor": (2, f"{ONE} {TENSOR}", {"all_gather", "reduce_scatter"}),
    "tensor-1f1b": (4, f"{STAGES} parallel.partition=1-2 {TENSOR}", {"send", "recv", "all_gather", "reduce_scatter"}),
    "sharded": (
        2,
        f"{REPLICAS} parallel.sharded_optimizer=true train.precision=bf16",
        {"reduce_scatter", "all_gather"},
    ),
    "context": (2, f"{ONE} parallel.context=2", {"all_gather"}),
}
"""GPUs, overrides, and calls of NCCL's that an iteration makes. Experts are left out: how many tokens go to which is
computed, and nothing computes here."""


IN_OTHERS = {"single", "bf16", "1f1b", "tensor"}
"""Of which each is a part of another layout."""


@pytest.mark.parametrize(
    ("gpus", "words", "calls"),
    [pytest.param(*of, id=name, marks=[pytest.mark.slow] * (name in IN_OTHERS)) for name, of in LAYOUTS.items()],
)
def test_a_layout_trains_on_gpus(tmp_path: Path, gpus: int, words: str, calls: set[str]) -> None:
    run = make_run(
        tmp_path / "run",
        make_corpus(tmp_path),
        *(GPU, "engine=megatron_core", "parallel.micro_batch_size=1", *words.split()),
    )
    assert run.plan.device == "cuda"
    machine = Machine(gpus, tmp_path / "machine")
    ended = machine.run(WORKER, run.run.plan, "0", environment=BESIDE)
    assert ended.returncode == 0, ended.stderr
    assert len(run.metrics()) == run.plan.train.iterations
    logs = machine.logs()
    assert len(logs) == gpus
    for log in logs:
        third = counts(log, 3)
        assert sum(third.kernels.values()) > 0
        assert not third.unmade
        assert {one.call for one in third.messages} >= calls
    table = read_run({rank: run.run.events / f"rank-{rank:05d}.bin" for rank in range(gpus)}).events
    assert {*table.name} >= {"forward-compute", "backward-compute", "optimizer"}
    assert (table.end_ns >= table.start_ns).all()
    assert json.loads((run.run.path / "memory/rank-00000.json").read_text())["mib"]["max_allocated"] > 0
