"""In fp16 each stage has a loss scale of its own; an update that overflows gives a version like the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch

from megatron_ext.engine.executor.executor import LOSS
from megatron_ext.engine.optimizer.precision import LossScaler
from megatron_ext.engine.streams.executor import SCALE, StageScale
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, SGD, Case, assert_as_delayed
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT
from tests.support.megatron_ext.engine_run import EngineRun

FP16 = ("train.precision=fp16", "train.iterations=8", "train.lr_decay_iterations=8")
LOGMAX = "train.loss_scaler=logmax"
CPU = torch.device("cpu")


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that grows, and so overflows, every few updates, from about where it first fits on."""
    monkeypatch.setattr(
        LossScaler, "of", lambda precision: LossScaler(2.0**22, dynamic=True, window=4) if precision == "fp16" else None
    )


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 1, 1), "stashing", (*ADAM, *FP16)),
        Case((2, 1), "vertical", (*SGD, *FP16, *DROPOUT)),
        Case((1, 2), "latest", (*ADAM, *FP16, "parallel.recompute=full")),
        Case((2, 1, 1), "two", (*SGD, *FP16), 1, 8),
        Case((1, 1, 1), "stashing", (*SGD, *FP16, LOGMAX)),
        Case((2, 2), "stashing", (*ADAM, *FP16, LOGMAX), 2),
        Case((2,), "stashing", (*ADAM, *FP16)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("growing")
def test_stages_learn_what_one_process_does(engine_run: Callable[..., EngineRun], case: Case) -> None:
    """With overflows on the way. Where scales are no powers of two, as logmax's are, fp16 rounds what they multiply."""
    run = engine_run(*case.overrides())
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run, 1e-3 if LOGMAX in case.others and max(case.replicas) > 1 else 1e-5)
    for stage, block in ((0, "embedding"), (len(case.replicas) - 1, "head")):
        stream = run.plan.stream
        assert stream is not None
        every = stream.updates(stage, run.plan.train.iterations * case.window)
        made = int(run.state()[f"optimizer/{block}.updates"])
        assert 0 < made <= every if LOGMAX in case.others else 0 < made < every


def test_it_learns_what_fp32_does_and_all_stages_soon_find_their_scale(engine_run: Callable[..., EngineRun]) -> None:
    """From Megatron's 2^32 on: one stage does not wait until those after it have found theirs."""
    case = Case((2, 1, 1), "stashing", SGD)
    longer = ("train.iterations=24", "train.lr=0.02", "train.lr_decay_iterations=24")
    run, exact = (engine_run(*case.overrides(), *longer, f"train.precision={p}", name=p) for p in ("fp16", "fp32"))
    assert run.go() == 0, run.stderr()
    assert exact.go() == 0, exact.stderr()
    skipped = [line["skipped"] for line in run.metrics()]
    assert skipped[0] == 1
    assert skipped == sorted(skipped, reverse=True)
    assert run.metrics()[0]["loss"] is None
    state = run.state()
    for stage, block in ((0, "embedding"), (1, "layer-00002"), (2, "head")):
        assert run.plan.stream is not None
        every = run.plan.stream.updates(stage, 24 * case.window)
        assert every - 30 < int(state[f"optimizer/{block}.updates"]) < every - 5
        assert 2.0**4 < float(state[f"optimizer/{block}.scaler"][0]) < 2.0**26
    assert exact.losses()[-1] < exact.losses()[0] - 0.3
    assert run.losses()[-1] == pytest.approx(exact.losses()[-1], abs=0.15)


@pytest.mark.usefixtures("growing")
def test_the_ranks_of_a_tensor_group_agree_on_the_scale(engine_run: Callable[..., EngineRun]) -> None:
    """Also where each has received a share of the sequence, which alone was not finite."""
    case = Case((1, 1), "stashing", (*SGD, *FP16, "train.lr=0.02"))
    alone, run = (
        engine_run(*case.overrides(), name="alone"),
        engine_run(*case.overrides(), "parallel.tensor=2", "parallel.sequence_parallel=true"),
    )
    assert alone.go() == 0, alone.stderr()
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), alone.losses(), rtol=0.01)
    for block in ("embedding", "head"):
        made = [int(one.state()[f"optimizer/{block}.updates"]) for one in (alone, run)]
        assert made[1] == pytest.approx(made[0], abs=4)
        assert made[1] < 8 * case.window


@pytest.mark.parametrize("scaler", ["backoff", "logmax"])
@pytest.mark.usefixtures("growing")
def test_a_resumed_run_goes_on_with_the_scale_of_each_stage(engine_run: Callable[..., EngineRun], scaler: str) -> None:
    case = Case((2, 1), "stashing", (*ADAM, *FP16, f"train.loss_scaler={scaler}"))
    saving = ("train.save_interval=4", "train.keep_checkpoints=9")
    whole, run = (engine_run(*case.overrides(), *saving, name=name) for name in ("whole", "resumed"))
    assert whole.go() == 0, whole.stderr()
    short = run.replan(*case.overrides(), *saving, "train.iterations=4")
    assert short.go() == 0, short.stderr()
    then = run.replan(*case.overrides(), *saving)
    assert then.go() == 0, then.stderr()
    assert [line["loss"] for line in then.metrics()] == [line["loss"] for line in whole.metrics()]
    assert then.state().keys() == whole.state().keys()
    for name, value in whole.state().items():
        torch.testing.assert_close(then.state()[name], value, rtol=0, atol=0)


def test_another_layout_goes_on_from_its_checkpoint(engine_run: Callable[..., EngineRun]) -> None:
    """With the smallest scale of the stages whose blocks it has, or with a flush with one for all."""
    case = Case((1, 1), "stashing", (*SGD, *FP16))
    run = engine_run(*case.overrides(), "train.iterations=4")
    assert run.go() == 0, run.stderr()
    then = run.replan(*Case((2,), "stashing", (*SGD, *FP16)).overrides(), "train.iterations=6")
    assert then.go() == 0, then.stderr()
    flush = ("parallel.schedule=one_f_one_b", "parallel.semantics=stashing", "parallel.replicas=null")
    last = run.replan(*case.overrides(), *flush)
    assert last.go() == 0, last.stderr()
    skipped = [line["skipped"] for line in last.metrics()]
    assert skipped[:4] == [1, 1, 1, 1][: sum(skipped)] + [0] * (4 - sum(skipped))
    assert not any(skipped[4:])


class TestStageScale:
    LEFT: ClassVar = {"wire": torch.zeros(3, dtype=torch.float16)}

    def test_the_last_stage_multiplies_its_loss(self) -> None:
        gradients, sent = StageScale(LossScaler(8.0, True), CPU, ()).entering({LOSS: torch.tensor(2.5)}, {})
        assert gradients[LOSS] == 8.0
        assert sent.view(torch.float32) == 8.0

    def test_what_is_received_gets_the_own_scale(self) -> None:
        scale = StageScale(LossScaler(2.0**20, True), CPU, ())
        gradients, sent = scale.entering(self.LEFT, received([1.0, -2.0, 0.0], 2.0**10))
        assert gradients["wire"].tolist() == [2.0**10, -(2.0**11), 0.0]
        assert gradients["wire"].dtype == torch.float16
        assert sent.view(torch.float32) == 2.0**20
        assert scale.is_own_fault()

    def test_every_scale_is_sent_as_it_is(self) -> None:
        """The halves of a number in fp32 may be no numbers of fp16."""
        for value in (1.0, 2.0**32, 13.37, 1.4012984e-45):
            scale = StageScale(LossScaler(value, True), CPU, ())
            _, sent = scale.entering(self.LEFT, received([1.0], 1.0))
            assert torch.cat([sent, sent[:0]]).view(torch.float32).item() == np.float32(value)

    @pytest.mark.parametrize(("own", "blamed"), [(2.0**9, False), (2.0**10, True), (2.0**11, True)])
    def test_a_stage_is_blamed_unless_a_later_one_had_a_larger_scale(self, own: float, blamed: bool) -> None:
        scale = StageScale(LossScaler(own, True), CPU, ())
        _, sent = scale.entering(self.LEFT, received([1.0, np.inf, 0.0], 2.0**10))
        assert sent.view(torch.float32) == 2.0**10  # for the stages before, too
        scale.entering(self.LEFT, received([1.0, 0.0, 0.0], 2.0**12))
        assert scale.is_own_fault() == blamed
        scale.updated()
        assert scale.is_own_fault()


def received(gradient: list[float], scale: float) -> dict[str, torch.Tensor]:
    bits = torch.tensor([scale], dtype=torch.float32).view(torch.float16)
    return {"wire": torch.tensor(gradient, dtype=torch.float16), SCALE.name: bits}
