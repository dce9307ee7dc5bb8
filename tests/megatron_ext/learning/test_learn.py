"""One process learns under a plan's delays what the plan's ranks learn: every loss, and every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.contract.errors import EngineError
from megatron_ext.engine.results import NotFinite
from megatron_ext.learning.learn import learn
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, FULL, SGD, Case
from tests.megatron_ext.engine.streams.test_streams_of_families import STREAM
from tests.megatron_ext.engine.test_adaptive_agrees import GROWING, LAYOUTS
from tests.megatron_ext.engine.test_images_agree import BASE
from tests.megatron_ext.engine.test_images_agree import MODELS as IMAGES
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT
from tests.megatron_ext.engine.test_translation_agrees import MODELS as TRANSLATION
from tests.megatron_ext.tasks.user.test_module import module_run
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.pairs import write_pairs

EVALUATED = ("train.iterations=6", "train.eval_interval=2", "data.split='70,30,0'")
EMA = ("train.ema=0.8",)
CLIPPED = ("train.clip_grad=0.05", "train.lr_policy=polynomial", "train.lr_power=2.0")
FLUSHED = ("model.layers=4", "parallel.micro_batch_size=1", "parallel.data=1", "parallel.global_batch_size=12")


def assert_same(run: EngineRun, rtol: float = 1e-5) -> None:
    """Of all iterations and their evaluations."""
    assert run.go() == 0, run.stderr()
    found = [*learn(run.plan)]
    lines = run.metrics()
    assert [one.iteration for one in found] == [line["iteration"] for line in lines]
    losses = [(one.loss, line["loss"]) for one, line in zip(found, lines, strict=True) if line["loss"] is not None]
    assert len(losses) > len(found) / 5  # of one that fp16's loss scale skips there is none in the log
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=rtol)
    evaluated = [(one, line) for one, line in zip(found, lines, strict=True) if one.metrics or "valid_loss" in line]
    for one, line in evaluated:
        expected = {name.removeprefix("valid_"): value for name, value in line.items() if name.startswith("valid_")}
        assert one.metrics == pytest.approx(expected, rel=rtol, abs=1e-7), one.iteration
    assert bool(evaluated) == (run.plan.train.eval_interval is not None)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 1), "stashing", SGD),
        Case((1, 1, 1, 1), "stashing", (*ADAM, *DROPOUT)),
        Case((2, 1, 1), "vertical", (*ADAM, *EMA), update_every=2),
        Case((1, 2), "latest", (*SGD, *DROPOUT, FULL)),
        Case((1, 1, 2), "two", (*ADAM, *DROPOUT, *CLIPPED)),
        Case((2, 2), "stashing", (*SGD, "parallel.depth=2-0", *EMA)),
        Case((1,), "stashing", ADAM, window=6),
    ],
    ids=str,
)
def test_a_pipeline_without_a_flush(engine_run: Callable[..., EngineRun], case: Case) -> None:
    assert_same(engine_run(*case.overrides(), *EVALUATED))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.data=3",),
        ("parallel.pipeline=4", "parallel.schedule=gpipe", *DROPOUT, *EMA),
        ("parallel.pipeline=2", "parallel.replicas=3-1", "parallel.schedule=zb_h1", *SGD),
        ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-1-1"),
        ("parallel.tensor=2", "parallel.data=2", "parallel.shares=2-1", "parallel.sharded_optimizer=true", *CLIPPED),
        ("parallel.data=2", "parallel.recompute=full"),
    ],
    ids=" ".join,
)
def test_a_plan_that_flushes(engine_run: Callable[..., EngineRun], layout: Sequence[str]) -> None:
    """With tied weights, on whatever stages they are."""
    assert_same(engine_run(*FLUSHED, *layout, *EVALUATED))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.data=3", "parallel.islands=2-1", "parallel.shares=5-4-3", *DROPOUT, *CLIPPED),
        ("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-3", *SGD),
        (
            *("parallel.data=2", "parallel.islands=1-1", "parallel.pipeline=2", "parallel.partition=1-3/4"),
            *("parallel.tensor=1/2", "parallel.shares=1-3", *DROPOUT, *CLIPPED),
        ),
    ],
    ids=["of-unequal-sizes", "of-pipelines", "of-plans-of-their-own"],
)
def test_islands_with_the_weights_of_their_last_common_step(
    engine_run: Callable[..., EngineRun], layout: Sequence[str]
) -> None:
    words = ("model.layers=4", "parallel.micro_batch_size=1", "parallel.global_batch_size=12", "train.sync_every=3")
    assert_same(engine_run(*words, *layout, *EVALUATED))


@pytest.mark.parametrize("layout", ["three replicas", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_a_batch_that_adapts(engine_run: Callable[..., EngineRun], layout: str) -> None:
    """It grows and, at the end of the samples, shrinks; the number of replicas decides how far."""
    words = [*GROWING, *LAYOUTS[layout], "train.eval_interval=3", "data.split='70,30,0'", "adapt.lr_scaling=linear"]
    run = engine_run(*words)
    assert_same(run)
    found = [*learn(run.plan)]
    batches = [line["global_batch_size"] for line in run.metrics()]
    assert [one.micro_batches * run.plan.micro_batch_size for one in found] == batches
    assert len({*batches}) > 3
    assert found[-1].samples == sum(batches)


@pytest.mark.slow
def test_a_batch_that_adapts_with_running_statistics_and_noise(tmp_path: Path) -> None:
    images = make_images(tmp_path, 32)
    base = ("parallel=single", *IMAGES["resnet"], *BASE, "parallel.micro_batch_size=2", *SGD, "train.lr=0.01")
    adapt = ("adapt.rule=noise", "adapt.target=0.9", "adapt.every=1", "adapt.smoothing=2", "adapt.upper=48")
    length = ("train.samples=200", "train.iterations=null", "parallel.global_batch_size=8", "train.eval_interval=2")
    assert_same(make_run(tmp_path / "run", images, *base, "parallel.data=2", *adapt, *length, base=()))


@pytest.mark.slow
def test_a_batch_that_adapts_with_token_weights(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, 61)
    words = [*TRANSLATION["untied-gnmt"], "parallel.micro_batch_size=1", "train.eval_interval=2", "parallel.data=2"]
    adapt = ["adapt.rule=similarity", "adapt.target=0.99", "adapt.every=2", "adapt.rate=0.5", "adapt.upper=24"]
    length = ["train.samples=100", "train.iterations=null", "parallel.global_batch_size=6", "parallel.shares=2-1"]
    assert_same(make_run(tmp_path / "run", pairs, "parallel=single", *words, *adapt, *length))


@pytest.mark.parametrize(
    ("layout", "precision"),
    cases.covering(product((STREAM, ()), ("bf16", "fp16")), set, always=[(STREAM, "fp16")]),
    ids=lambda value: value if isinstance(value, str) else "stream" if value else "flush",
)
def test_16_bit(engine_run: Callable[..., EngineRun], layout: Sequence[str], precision: str) -> None:
    """Where a sum in another order is rounded to another weight."""
    untied = "model.untie_embeddings_and_output_weights=true"
    words = (f"train.precision={precision}", "parallel.pipeline=2", "parallel.replicas=2-1", untied, *layout)
    longer = ("train.iterations=32", "train.eval_interval=8") if precision == "fp16" else ()
    assert_same(engine_run(*FLUSHED, *words, *EVALUATED, *longer), rtol=1e-4 if precision == "bf16" else 1e-3)


def test_images_with_running_statistics(tmp_path: Path) -> None:
    images = make_images(tmp_path, 32)
    base = ("parallel=single", *IMAGES["resnet"], *BASE, *STREAM, "parallel.micro_batch_size=2", *SGD, "train.lr=0.01")
    stages = ("parallel.pipeline=2", "parallel.replicas=2-1", "train.eval_interval=2")
    assert_same(make_run(tmp_path / "run", images, *stages, base=(*base, "parallel.global_batch_size=10")))


def test_images_with_running_statistics_and_a_flush(tmp_path: Path) -> None:
    images = make_images(tmp_path, 32)
    base = ("parallel=single", *IMAGES["resnet"], *BASE, "parallel.micro_batch_size=2", *SGD, "train.lr=0.01")
    stages = ("parallel.pipeline=2", "parallel.data=2", "parallel.partition=3-2", "train.eval_interval=2")
    assert_same(make_run(tmp_path / "run", images, *base, *stages, base=()))


@pytest.mark.parametrize("layout", ["stream", "flush"])
def test_translation_with_lengths_of_their_own(tmp_path: Path, layout: str) -> None:
    pairs = write_pairs(tmp_path, 61)
    words = [*TRANSLATION["untied-gnmt"], "parallel.micro_batch_size=1", "data.bucketing=3", "train.eval_interval=2"]
    stages = ["parallel.pipeline=3", "parallel.partition=2-3-1", "parallel.global_batch_size=6", "parallel.data=1"]
    stream = [*STREAM, "parallel.replicas=2-1-1"] if layout == "stream" else []
    assert_same(make_run(tmp_path / "run", pairs, "parallel=single", *words, *stages, *stream))


def test_a_users_module(tmp_path: Path) -> None:
    words = (*STREAM, "parallel.pipeline=2", "parallel.replicas=2-1", *SGD)
    assert_same(module_run(tmp_path / "run", "UNet", *words))


def test_another_plan_learns_otherwise(engine_run: Callable[..., EngineRun]) -> None:
    """Or the tests above would show nothing."""
    run = engine_run(*Case((3, 1), "stashing", SGD).overrides(), *EVALUATED)
    assert run.plan.streaming is not None
    losses = [one.loss for one in learn(run.plan)]
    latest = replace(run.plan, streaming=replace(run.plan.streaming, semantics="latest"))
    flushed = replace(run.plan, streaming=None)
    for other in (latest, flushed):
        assert not np.allclose([one.loss for one in learn(other)], losses, rtol=1e-4)


def test_the_seed_decides(engine_run: Callable[..., EngineRun]) -> None:
    plan = engine_run(*Case((3, 1), "stashing", SGD).overrides(), *EVALUATED).plan
    assert [*learn(plan)] == [*learn(plan)]
    other = replace(plan, train=replace(plan.train, seed=plan.train.seed + 1))
    assert [one.loss for one in learn(other)] != [one.loss for one in learn(plan)]


@pytest.mark.parametrize("schedule", ["pipedream", "one_f_one_b"])
def test_a_training_that_leaves_the_numbers_says_so(engine_run: Callable[..., EngineRun], schedule: str) -> None:
    words = (*Case((1, 1), "stashing", SGD).overrides(), f"parallel.schedule={schedule}", "train.lr=1e6")
    with pytest.raises(NotFinite, match=r"train\.lr"):
        [*learn(engine_run(*words, "train.clip_grad=0").plan)]


def test_stages_that_share_a_parameter_are_refused(tmp_path: Path) -> None:
    run = module_run(tmp_path / "run", "SharedEmbedding", *STREAM, "parallel.pipeline=2")
    with pytest.raises(EngineError, match="share the parameter"):
        [*learn(run.plan)]
