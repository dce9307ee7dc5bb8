"""What ranks do on GPUs beside training: profiles, the doctor's checks, checkpoints and exported models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.contract.worker import PROFILE
from tests.support.cuda.machine import WORKER, Machine
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run

GPU = "cluster.gpus.cpu.name=GPU"
TWO = ("parallel.data=2", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=2")
SHORT = ("train.iterations=1", "train.lr_warmup_iterations=0")
NAME = "NVIDIA A100-SXM4-80GB"
"""That of the stand-in's GPUs."""


@pytest.fixture
def engine_run(tmp_path: Path) -> Callable[..., EngineRun]:
    return lambda *words: make_run(tmp_path / "run", make_corpus(tmp_path), GPU, *words)


def test_a_profile_is_measured_on_gpus(engine_run: Callable[..., EngineRun], tmp_path: Path) -> None:
    run = engine_run(*TWO, "train.precision=bf16")
    request = {"padded_vocab_sizes": {"2": 62}, "micro_batch_sizes": [1], "seconds": 0.3, "streams": [1, 2]}
    ended = Machine(2, tmp_path / "machine").run(
        WORKER, run.run.plan, "0", "profile", environment={PROFILE: json.dumps(request)}
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(run.plan.files.profile_rank(0).read_text())
    assert found["device"] == NAME
    (point,) = found["points"]
    assert point["too_large"] is None
    assert min(point["parts"][part][way] for part in point["parts"] for way in ("forward", "backward")) > 0


def test_the_doctor_examines_gpus(engine_run: Callable[..., EngineRun], tmp_path: Path) -> None:
    run = engine_run(*TWO)
    notes = run.run.path / "doctor"
    notes.mkdir()
    ended = Machine(2, tmp_path / "machine").run(WORKER, run.run.plan, "0", "doctor")
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        found = json.loads((notes / f"rank-{rank:05d}.json").read_text())
        assert (found["stage"], found["gpus"]) == ("done", [NAME] * 2)
        assert found["memory"][1] == 80 * 2**30


@pytest.mark.parametrize("saved", ["at once", "meanwhile"])
def test_a_checkpoint_of_gpus_has_the_weights_that_the_host_gave_them(
    engine_run: Callable[..., EngineRun], tmp_path: Path, saved: str
) -> None:
    """No kernel changes them here, so that they are those that a CPU begins with, and hardly changes."""
    words = (*TWO, "parallel.sharded_optimizer=true", *SHORT, f"train.save_async={saved == 'meanwhile'}")
    run = engine_run(*words)
    ended = Machine(2, tmp_path / "machine").run(WORKER, run.run.plan, "0")
    assert ended.returncode == 0, ended.stderr
    begun = make_run(tmp_path / "cpu", run.plan.data_prefix, *TWO, *SHORT, "train.lr=1e-30", "train.min_lr=0")
    assert begun.go() == 0
    expected = begun.weights()
    assert run.weights().keys() == expected.keys()
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-20, msg=name)
