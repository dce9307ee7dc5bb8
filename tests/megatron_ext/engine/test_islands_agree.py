"""Islands train what one process trains that simulates them: losses, weights, moments and the outer momentum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.engine import engine
from tests.support.megatron_ext.engine_run import EngineRun
from tests.support.megatron_ext.textbook import islands, textbook

Engine = Callable[..., EngineRun]
DROPOUT = "model.hidden_dropout=0.3 model.attention_dropout=0.2"
SGD = "train.optimizer=sgd train.lr=0.1"
MEAN = "train.outer_lr=1 train.outer_momentum=0"
CASES: dict[str, tuple[tuple[int, ...], str]] = {
    "two": ((1, 1), f"parallel.data=2 parallel.pipeline=1 train.sync_every=2 {DROPOUT}"),
    "two-pipelines": ((1, 1), "parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 train.sync_every=2"),
    "of-unequal-shares": (
        (1, 1),
        "parallel.data=2 parallel.shares=3-1 parallel.pipeline=2 parallel.partition=2-1 parallel.micro_batch_size=2 "
        f"train.sync_every=3 {DROPOUT}",
    ),
    "of-unequal-sizes": (
        (2, 1),
        "parallel.data=3 parallel.islands=2-1 parallel.pipeline=1 parallel.shares=2-1-1 parallel.micro_batch_size=2 "
        "train.sync_every=2",
    ),
    "of-two-pipelines-each": (
        (2, 2),
        "parallel.data=4 parallel.islands=2*2 parallel.pipeline=2 parallel.partition=1-2 train.sync_every=3",
    ),
    "three-with-a-tied-embedding": (
        (1, 1, 1),
        "parallel.data=3 parallel.pipeline=2 parallel.partition=1-2 parallel.global_batch_size=6 train.sync_every=1",
    ),
    "tensor-groups": (
        (1, 1),
        "parallel.tensor=2 parallel.data=2 parallel.pipeline=2 parallel.partition=2-1 parallel.sequence_parallel=true "
        f"train.sync_every=2 {DROPOUT}",
    ),
    "unlike-tensor-groups": (
        (1, 1), "parallel.tensor=2-1 parallel.data=2 parallel.pipeline=2 parallel.partition=2-1 train.sync_every=2"
    ),
    "interleaved": (
        (1, 1),
        "parallel.data=2 parallel.pipeline=2 parallel.chunks=2 parallel.schedule=interleaved "
        "parallel.partition=1-0-1-1 train.sync_every=2",
    ),
    "sgd": ((1, 1), f"parallel.data=2 parallel.pipeline=2 parallel.partition=1-2 train.sync_every=2 {SGD}"),
    "sgd-averaged": (
        (2, 1),
        f"parallel.data=3 parallel.islands=2-1 parallel.shares=1-2-1 parallel.pipeline=1 parallel.micro_batch_size=2 "
        f"train.sync_every=3 {SGD} {MEAN}",
    ),
    "lamb": ((1, 1), "parallel.data=2 parallel.pipeline=1 train.sync_every=2 train.optimizer=lamb"),
    "streams": ((1, 1), "parallel.data=2 parallel.streams=2 parallel.pipeline=1 train.sync_every=2"),
    "of-plans-of-their-own": (
        (2, 1),
        "parallel.data=3 parallel.islands=2-1 parallel.pipeline=2 parallel.partition=1-2/3 parallel.micro_batch_size=2 "
        f"parallel.shares=1-1-2 train.sync_every=2 {DROPOUT}",
    ),
    "of-other-tensor-groups": (
        (1, 1, 1),
        "parallel.data=3 parallel.islands=1*3 parallel.pipeline=2 parallel.tensor=2/1/4-2 parallel.partition=3/1-2/2-1 "
        "parallel.sequence_parallel=true parallel.micro_batch_size=1 parallel.shares=4-1-3 train.sync_every=3",
    ),
    "of-other-replicas-and-tensor-groups": (
        (2, 3),
        "parallel.data=5 parallel.islands=2-3 parallel.pipeline=3 parallel.tensor=2/1 parallel.partition=3/1-1-1 "
        "parallel.shares=2-2-2-1-1 parallel.micro_batch_size=1 train.sync_every=2 train.optimizer=lamb",
    ),
}  # fmt: skip
QUICK = (
    "of-plans-of-their-own",
    "of-other-tensor-groups",
    "two",
    "of-unequal-shares",
    "of-unequal-sizes",
    "sgd",
    "tensor-groups",
)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_islands_equal_one_process_that_simulates_them(
    engine_run: Engine, corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    sizes, words = CASES[name]
    run = engine_run(*words.split())
    assert run.go() == 0, run.stderr()
    losses, state = islands(run.plan, corpus, sizes)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-5)
    equal(run.state(), state)


def test_averaging_after_every_step_of_sgd_is_synchronous_training(engine_run: Engine, corpus: Path) -> None:
    words = f"parallel.data=3 parallel.shares=2-1-1 parallel.pipeline=1 parallel.micro_batch_size=2 {SGD}".split()
    run = engine_run(*words, *MEAN.split(), "train.sync_every=1", "parallel.islands=1-2", "train.clip_grad=0")
    assert run.go() == 0, run.stderr()
    synchronous = engine_run(*words, "train.clip_grad=1e9", name="synchronous")
    losses, state = textbook(synchronous.plan, corpus)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-5)
    equal(run.weights(), {name[len("weights/") :]: one for name, one in state.items() if name.startswith("weights/")})


SAVED = ["train.iterations=6", "train.save_interval=1", "train.keep_checkpoints=9", "train.sync_every=4"]


@pytest.mark.parametrize("after", [3, 4, 5], ids=lambda after: f"after-{after}")
def test_a_run_that_goes_on_equals_an_uninterrupted_one(engine_run: Engine, after: int) -> None:
    """In the middle between two steps of the outer optimizer, and after one."""
    words = [*SAVED, "parallel.data=3", "parallel.islands=2-1", "parallel.shares=1-2-1", "parallel.micro_batch_size=2"]
    run = engine_run(*words, "parallel.pipeline=1")
    assert run.go() == 0, run.stderr()
    folder = run.plan.files.checkpoints / f"iter_{after:07d}"
    again = engine_run(
        *words, "parallel.pipeline=2", "parallel.partition=1-2/3", f"train.load={folder}", name="again"
    )  # fmt: skip
    assert again.go() == 0, again.stderr()
    np.testing.assert_allclose(again.losses(), run.losses()[after:], rtol=1e-5)
    equal(again.state(), run.state())
