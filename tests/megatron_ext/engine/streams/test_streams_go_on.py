"""A pipeline without a flush is empty where its weights are saved or evaluated, and goes on as if nothing had been."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.worker import SAVED
from megatron_ext.engine import engine
from megatron_ext.engine.results import StepResult
from megatron_ext.engine.streams.streaming import StreamingEngine
from megatron_ext.parallel import interruption
from megatron_ext.parallel.comm import Outbox
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, SGD, Case, assert_as_delayed
from tests.support.megatron_ext.engine_run import EngineRun

CASE = Case((2, 1, 1), "stashing", ADAM)
LONG = ["train.iterations=6", "train.lr_decay_iterations=6"]
SAVING = [*LONG, "train.save_interval=2", "train.keep_checkpoints=9"]


@pytest.mark.parametrize("case", [CASE, Case((3, 1), "vertical", SGD, 1, 4)], ids=str)
def test_resumed_between_its_epochs_a_run_trains_the_same(engine_run: Callable[..., EngineRun], case: Case) -> None:
    whole, run = (engine_run(*case.overrides(), *SAVING, name=name) for name in ("whole", "resumed"))
    assert whole.go() == 0, whole.stderr()
    assert_as_delayed(whole)
    short = run.replan(*case.overrides(), *SAVING, "train.iterations=4")
    assert short.go() == 0, short.stderr()
    then = run.replan(*case.overrides(), *SAVING)
    assert then.go() == 0, then.stderr()
    assert [line["loss"] for line in then.metrics()] == [line["loss"] for line in whole.metrics()]
    for name, value in whole.state().items():
        torch.testing.assert_close(then.state()[name], value, rtol=0, atol=0)


def test_any_layout_goes_on_from_its_checkpoint(engine_run: Callable[..., EngineRun]) -> None:
    """Two others, which flush, have the same losses from there on; a third one streams again."""
    run = engine_run(*CASE.overrides(), *LONG, "train.iterations=2")
    assert run.go() == 0, run.stderr()
    counts = {int(value) for name, value in run.state().items() if name.startswith("optimizer/")}
    assert counts == {7, 14}  # of the first stage, with two replicas, and of the others
    load = f"train.load={run.run.path}"
    flushed = []
    flush = ("parallel.schedule=one_f_one_b", "parallel.semantics=stashing", "parallel.replicas=null", load)
    for name, sizes in (
        ("one", ("parallel.pipeline=1", "parallel.partition=null")),
        ("two", ("parallel.pipeline=2", "parallel.partition=1-4")),
    ):
        other = engine_run(*CASE.overrides(), *LONG, *flush, *sizes, name=name)
        assert other.go() == 0, other.stderr()
        flushed.append(other.losses())
    np.testing.assert_allclose(*flushed, rtol=1e-5)
    again = engine_run(*Case((1, 2), "latest", ADAM).overrides(), *LONG, load, name="again")
    assert again.go() == 0, again.stderr()
    assert len(again.losses()) == 4


def test_an_evaluation_sees_the_newest_weights(engine_run: Callable[..., EngineRun]) -> None:
    """As often as it comes: the weights that it sees are those of a checkpoint, which one process evaluates alike."""
    evaluated = [*LONG, "data.split='70,30,0'", "train.eval_interval=3"]
    run = engine_run(*CASE.overrides(), *evaluated)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)
    lines = {line["iteration"]: line["valid_loss"] for line in run.metrics() if "valid_loss" in line}
    assert sorted(lines) == [3, 6]
    alone = engine_run(
        *(*CASE.overrides(), *evaluated, "parallel.schedule=one_f_one_b", "parallel.replicas=null"),
        *("parallel.pipeline=1", "parallel.partition=null", f"train.load={run.run.path}", "train.iterations=7"),
        *("train.lr=1e-30", "train.min_lr=0", "train.eval_interval=1", "train.weight_decay=0"),
        name="alone",
    )
    assert alone.go() == 0, alone.stderr()
    assert alone.metrics()[-1]["valid_loss"] == pytest.approx(lines[6], rel=1e-5)


@pytest.mark.parametrize(
    "case", [CASE, Case((1, 1, 1), "stashing", SGD, 1, 1), Case((2, 1), "two", SGD, 8, 4)], ids=str
)
def test_asked_to_end_it_saves_soon_and_later_goes_on(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Only one rank is asked; nothing is due to be saved."""
    long = ["train.iterations=60", "train.lr_decay_iterations=60"]
    run = engine_run(*case.overrides(), *long)
    step = StreamingEngine.step
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # the ranks are forked from this process

    def until(self: StreamingEngine, iteration: int, **others: Any) -> StepResult:
        if iteration == 3 and self._place.rank == 1:
            os.kill(os.getpid(), interruption.SIGNAL)
        return step(self, iteration, **others)

    monkeypatch.setattr(StreamingEngine, "step", until)
    assert run.go() == SAVED, run.stderr()
    assert not run.errors()
    saved = Checkpoint.at(run.run.path).meta.iteration
    assert 3 < saved < 30
    assert len(run.metrics()) == saved
    monkeypatch.undo()
    assert run.go() == 0, run.stderr()
    assert [line["iteration"] for line in run.metrics()] == [*range(1, 61)]


def test_an_average_of_the_weights_and_bf16_go_through(engine_run: Callable[..., EngineRun], tmp_path: Path) -> None:
    run = engine_run(*CASE.overrides(), "train.precision=bf16", "train.ema=0.9", "train.clip_grad=0")
    assert run.go() == 0, run.stderr()
    exact = engine_run(*CASE.overrides(), "train.ema=0.9", "train.clip_grad=0", name="exact")
    assert exact.go() == 0, exact.stderr()
    assert_as_delayed(exact)
    np.testing.assert_allclose(run.losses(), exact.losses(), rtol=0.01)


@pytest.mark.parametrize(("precision", "size", "scale"), [("fp32", 4, 0), ("fp16", 2, 4)])
def test_what_is_sent_for_a_sample_is_what_crosses_the_cuts(
    engine_run: Callable[..., EngineRun],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    precision: str,
    size: int,
    scale: int,
) -> None:
    """Counted where it is sent: activations forward and their gradients back, once for each sample and cut."""
    sent = tmp_path / "sent"
    sent.mkdir()
    put = Outbox.put

    def counted(self: Outbox, tensor: torch.Tensor) -> None:
        with (sent / str(os.getpid())).open("a") as file:
            file.write(f"{tensor.numel() * tensor.element_size()}\n")
        put(self, tensor)

    monkeypatch.setattr(Outbox, "put", counted)
    run = engine_run(*Case((3, 1), "stashing", SGD).overrides(), f"train.precision={precision}")
    assert run.go() == 0, run.stderr()
    total = sum(int(line) for file in sent.iterdir() for line in file.read_text().split())
    plan = run.plan
    samples = plan.train.iterations * plan.global_batch_size
    assert total == samples * (2 * plan.model.sequence_length * plan.model.hidden * size + scale)
