"""Stages that keep unlike shares, or unlike things in their host's memory, train as one process, under every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.families.tasks import task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.task import Placement
from tests.megatron_ext.engine.optimizer.test_optimizers_agree import assert_equal
from tests.megatron_ext.engine.test_zero_agrees import (
    STAGES,
    TENSOR,
    TWO,
    Found,
    of_reference,
    reference,
    small_buckets,
)
from tests.support.megatron_ext.engine_run import EngineRun

__all__ = ["reference", "small_buckets"]
THREE = [*STAGES, "parallel.pipeline=3", "parallel.partition=1-1-1"]
UNTIED = "model.untie_embeddings_and_output_weights=true"
INTERLEAVED = [*STAGES, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-0-1-1"]
CASES = {
    "stages": [*STAGES, "parallel.zero=3-1"],
    "the-other-way": [*STAGES, "parallel.zero=1-3"],
    "gradients": [*STAGES, "parallel.zero=2-3"],
    "none-of-one": [*STAGES, "parallel.zero=3-0"],
    "none-of-the-first": [*STAGES, "parallel.zero=0-2"],
    "optimizer-of-one": [*STAGES, "parallel.zero=0-1"],
    "untied": [*STAGES, UNTIED, "parallel.zero=0-3"],
    "three": [*THREE, "parallel.zero=3-0-1"],
    "without-layers": [*THREE, "parallel.partition=0-3-0", "parallel.zero=1-3-2"],
    "zb_h1": [*STAGES, "parallel.schedule=zb_h1", "parallel.recompute=full:1", "parallel.zero=3-1"],
    "interleaved": [*INTERLEAVED, "parallel.zero=3-1"],
    "interleaved-none": [*INTERLEAVED, "parallel.zero=0-3"],
    "tensor": [*STAGES, *TENSOR, "parallel.recompute=full", "parallel.zero=3-1"],
    "tensor-none": [*STAGES, *TENSOR, "parallel.zero=2-0"],
    "tensor-by-stage": [*STAGES, *TENSOR, "parallel.tensor=1-2", "parallel.zero=0-3"],
    "replicas-by-stage": [*STAGES, "parallel.data=1", "parallel.replicas=1-2", "parallel.zero=1-0"],
    "shares": [*STAGES, "parallel.shares=5-3", "parallel.zero=2-1"],
    "clipped": [*STAGES, "train.clip_grad=0.1", "parallel.zero=1-0"],
    "lamb": [*STAGES, "train.optimizer=lamb", "train.lr=0.02", "parallel.zero=3-0"],
    "dropout": [*STAGES, "model.hidden_dropout=0.3", "parallel.zero=1-3"],
    "optimizer": [*STAGES, "parallel.offload=optimizer-none"],
    "activations": [*STAGES, "parallel.offload=none-activations"],
    "both": [*INTERLEAVED, "parallel.offload=both-optimizer"],
    "offloaded-tensor": [*STAGES, *TENSOR, "parallel.tensor=2-1", "parallel.offload=activations-both"],
    "recomputed": [*THREE, "parallel.recompute=full:1-none-full"],
    "recomputed-chunks": [*INTERLEAVED, "parallel.recompute=none-full:1", "parallel.zero=3-1"],
    "recomputed-or-offloaded": [*STAGES, "parallel.recompute=full-none", "parallel.offload=none-activations"],
    "all": [*THREE, "parallel.zero=3-0-2", "parallel.offload=optimizer-activations-both"],
}
QUICK = ("stages", "none-of-one", "three", "interleaved", "tensor-by-stage", "both", "all")


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=n, marks=() if n in QUICK else pytest.mark.slow) for n, words in CASES.items()],
)
def test_every_layout_equals_the_textbook(
    words: list[str], reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*words)
    assert run.plan.zeros or run.plan.offloads or len(run.plan.recompute.stages) > 1
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*of_reference(words)), 1e-5, 1e-5)


def test_a_run_goes_on_in_any_other_layout(
    reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    options = ["train.lr_decay_iterations=4"]
    half = engine_run(*STAGES, *options, "parallel.zero=3-0", "parallel.offload=none-optimizer", "train.iterations=2")
    assert half.go() == 0, half.stderr()
    others = {"plain": TWO, "other": [*THREE, "parallel.zero=0-3-1"], "offloaded": [*TWO, "parallel.offload=both"]}
    for name, words in others.items():
        run = half.replan(*words, *options)
        assert run.go() == 0, (name, run.stderr())
        assert_equal(run, *reference(), 1e-5, 1e-5)


def test_each_stage_keeps_its_own_share(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of weights, gradients and what the optimizer steps."""
    kept = tmp_path_factory.mktemp("kept")
    make = FlatWeights.__init__

    def noted(self: FlatWeights, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        parts = [len(one) / self.numel for one in (self.weight, self.grad)]
        (kept / "-".join(self.parameters)[:200]).write_text(f"{parts} {self.share.length / self.numel}")

    monkeypatch.setattr(FlatWeights, "__init__", noted)
    run = engine_run(*THREE, UNTIED, "parallel.zero=3-2-1")
    assert run.go() == 0, run.stderr()
    found = sorted(file.read_text() for file in kept.iterdir())
    assert found == ["[0.5, 0.5] 0.5", "[1.0, 0.5] 0.5", "[1.0, 1.0] 0.5"]


def test_each_stage_computes_its_own_layers_again(engine_run: Callable[..., EngineRun]) -> None:
    again = task_of(engine_run(*STAGES, "parallel.partition=2-1", "parallel.recompute=full:1-full").plan)
    layers = [one.make(TensorGroup()) for one in again.blocks if one.placement is Placement.COUNTED]
    assert [layer.recompute for layer in layers] == ["full", "none", "full"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.zero=3-1-1"], "parallel.zero=3-1-1 is for 3 stages, but parallel.pipeline=2"),
        (["parallel.zero=4-1"], "parallel.zero=4-1 must be 0, 1, 2 or 3, or one of them for each stage"),
        (["parallel.offload=optimizer-disk"], "parallel.offload=optimizer-disk must be none, optimizer"),
        (["parallel.zero=1-0", "adapt.rebalance=true"], "zero=1-0 cannot be combined with adapt.rebalance=true"),
        (["parallel.zero=1-0", "elastic.enabled=true"], "zero=1-0 cannot be combined with elastic.enabled=true"),
        (["parallel.zero=3-1", "parallel.shares=3-1"], "zero=3-1 cannot be combined with parallel.shares=3-1"),
        (["parallel.zero=1-0", "engine=megatron_core"], "parallel.zero=1-0 must be one number with"),
        (["parallel.zero=1-0", "engine=megatron_lm", "engine.checkout=/tmp"], "parallel.zero=1-0: Megatron-LM"),
        (
            ["parallel.offload=none-activations", "parallel.recompute=full"],
            "parallel.offload=none-activations cannot be combined with parallel.recompute=full",
        ),
        (
            ["parallel.offload=activations-none", "parallel.recompute=full-none"],
            "parallel.offload=activations-none cannot be combined with parallel.recompute=full-none",
        ),
        (["parallel.recompute=full-none-full"], "parallel.recompute=full-none-full is for 3 stages, but parallel.pipe"),
        (["parallel.recompute=selective-none"], "parallel.recompute=selective-none must be none, selective, full"),
        (["parallel.recompute=full-none", "elastic.enabled=true"], "recompute=full-none cannot be combined with elas"),
        (["parallel.recompute=full-none", "engine=megatron_core"], "parallel.recompute=full-none must be one for all"),
        (["parallel.recompute=full-none", "engine=megatron_lm", "engine.checkout=/tmp"], "=full-none: Megatron-LM"),
        (["parallel.offload=none-both", "train.sync_every=4"], "offload=none-both cannot be combined with train.sync"),
    ],
    ids=lambda one: one[-1] if isinstance(one, list) else "",
)
def test_what_does_not_go_with_it_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["model=tiny", "parallel.data=2", "parallel.pipeline=2", "parallel.partition=2-2", *words])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"zeros": [3]}, "of pipeline=2 values"),
        ({"zeros": [1, 1]}, "zero=3, which one of them is"),
        ({"zeros": [4, 1]}, "zeros"),
        ({"offloads": ["both", "none"]}, "together offload=None"),
        ({"recompute": "full-none-full"}, "recompute=.* must be of pipeline=2 values"),
    ],
    ids=["stages", "largest", "range", "together", "recomputed"],
)
def test_a_plan_says_of_each_stage_what_it_says_of_all(
    wrong: dict[str, object], told: str, engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*STAGES, "parallel.zero=3-1")
    run.run.write_json(run.run.plan, {**run.plan.as_json(), **wrong})
    with pytest.raises(EngineError, match=told):
        Plan.read(run.run.plan)


def test_one_value_for_all_is_the_plan_that_is_written_once() -> None:
    words = ["model=tiny", "parallel.data=2", "parallel.pipeline=2", "parallel.partition=2-2"]
    same = {"zero=3*2": "zero=3", "zero=0-0": "zero=0", "offload=both-both": "offload=both"}
    for by_stage, once in {**same, "recompute=full:1*2": "recompute=full:1"}.items():
        assert compose([*words, f"parallel.{by_stage}"]) == compose([*words, f"parallel.{once}"])
