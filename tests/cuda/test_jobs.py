"""What ranks do on GPUs beside training: profiles, the doctor's checks, checkpoints and exported models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.worker import PROFILE
from megatron_ext.inference import exported
from megatron_ext.inference.translator import weights_of
from tests.megatron_ext.engine import test_translation_agrees as translation
from tests.support.cuda.machine import WORKER, Machine, counts
from tests.support.megatron_ext.engine_run import EngineRun, make_corpus, make_run
from tests.support.megatron_ext.pairs import write_pairs

GPU = "cluster.gpus.cpu.name=GPU"
TWO = ("parallel.data=2", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=2")
ALONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=2")
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


def test_an_exported_model_translates_on_a_gpu(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", write_pairs(tmp_path, 61), GPU, *translation.MODELS["transformer"], *ALONE, *SHORT)
    machine = Machine(1, tmp_path / "machine")
    assert machine.run(WORKER, run.run.plan, "0").returncode == 0
    checkpoint = Checkpoint.at(run.run.path)
    file = tmp_path / "model.safetensors"
    exported.write(file, exported.Exported(checkpoint.meta.model, weights_of(checkpoint), "{}"))
    program = tmp_path / "translate.py"
    program.write_text(
        "import sys; from pathlib import Path\n"
        "from megatron_ext.inference import exported; from megatron_ext.inference.translator import Translator\n"
        "found = exported.read(Path(sys.argv[1]))\n"
        "print(*map(len, Translator(found.model, found.weights, 'cuda').translate([[9], [10, 11, 12]])))\n"
        "import os; sys.stdout.flush(); os._exit(0)\n"
    )
    ended = machine.run(program, file)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) == 2
    found = counts(machine.logs()[-1])
    assert sum(found.kernels.values()) > 100
    assert not found.unmade
