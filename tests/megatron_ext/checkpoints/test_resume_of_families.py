"""The curve after a kill and a start anew is the same, with everything on that a run has a state of: evaluations, their
average of the weights, the best checkpoint, and a policy of the learning rate. One run of each kind of task."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path

import pytest

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.results import StepResult
from tests.launch.commands.test_bleu_while_training import trained
from tests.launch.commands.test_translate import write_text
from tests.megatron_ext.engine.test_evaluation_of_families import made
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun

TIMED = ("unix", "elapsed_ms", "samples_per_s", "tokens_per_s", "tflops_per_rank", "evaluation_s")
WHOLE = [
    *("train.iterations=8", "train.eval_interval=2", "train.best=loss", "train.ema=0.7", "train.save_interval=3"),
    *("train.lr=3e-3", "train.min_lr=0", "train.lr_warmup_iterations=2", "parallel.micro_batch_size=2"),
]
KINDS = {
    "vit": ["train.lr_policy=step", "train.lr_step_iterations=2", "train.optimizer=lamb"],
    "resnet": ["train.lr_policy=exponential", "train.lr_step_iterations=3", "train.optimizer=sgd"],
    "transformer": ["train.lr_policy=noam"],
    "gnmt": ["train.lr_policy=polynomial", "train.lr_power=2"],
    "awd_lm": ["train.optimizer=sgd"],
    "mamba": ["train.optimizer=adam"],
    "s2vt": ["train.lr_policy=constant"],
}
LAYOUT = ["parallel.data=2", "parallel.pipeline=1", "parallel.sharded_optimizer=true"]


def killed(monkeypatch: pytest.MonkeyPatch, fatal: int) -> None:
    step = Engine.step

    def until(self: Engine, iteration: int, **others: bool) -> StepResult:
        if iteration == fatal and self._place.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, iteration, **others)

    monkeypatch.setattr(Engine, "step", until)


def curve(run: EngineRun) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key not in TIMED} for line in run.metrics()]


def assert_same(found: EngineRun, expected: EngineRun) -> None:
    """To the last bit: losses, learning rates, evaluations, all tensors of the newest and the best checkpoint."""
    assert curve(found) == curve(expected)
    state = expected.state()
    assert any(name.startswith("ema/") for name in state)
    assert found.state().keys() == state.keys()
    assert all(tensor.equal(state[name]) for name, tensor in found.state().items())
    metas = [Checkpoint.at(run.run.best_checkpoint).meta for run in (found, expected)]
    assert metas[0] == metas[1]
    assert metas[0].evaluation is not None


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fatal"), cases.covering(product(KINDS, (5, 8)), set))
def test_killed_and_started_again_it_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fatal: int
) -> None:
    words = [*WHOLE, *KINDS[family], *LAYOUT]
    expected, run = made(family, tmp_path / "whole", *words), made(family, tmp_path / "cut", *words)
    assert expected.go() == 0, expected.stderr()
    killed(monkeypatch, fatal)
    assert run.go() == 1
    monkeypatch.undo()
    assert Checkpoint.at(run.run.path).meta.iteration < fatal
    assert run.go() == 0, run.stderr()
    assert len(curve(run)) == 8
    assert_same(run, expected)


@pytest.mark.slow
def test_the_best_by_bleu_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path)
    words = ("train.ema=0.8", "train.iterations=24", "train.eval_interval=8", "train.save_interval=8")
    expected = trained(tmp_path / "whole", text, "transformer", *words)
    killed(monkeypatch, 21)
    with pytest.raises(AssertionError):
        trained(tmp_path / "cut", text, "transformer", *words)
    monkeypatch.undo()
    folder = tmp_path / "cut" / expected.run.path.name
    run = EngineRun(type(expected.run)(folder), expected.plan)
    assert run.go() == 0, run.stderr()
    assert_same(run, expected)
    assert "bleu" in (Checkpoint.at(run.run.best_checkpoint).meta.evaluation or {})
