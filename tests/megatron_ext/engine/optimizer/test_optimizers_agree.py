"""Every optimizer trains as torch's own does (LAMB: as its paper says), under every layout, and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoints.meta import to_load
from megatron_ext.contract.errors import EngineError
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

OPTIMIZERS = {
    "adam": ["train.optimizer=adam", "train.weight_decay=0.1"],
    "sgd": ["train.optimizer=sgd", "train.lr=0.1", "train.weight_decay=0.1"],
    "nesterov": ["train.optimizer=sgd", "train.nesterov=true", "train.momentum=0.8", "train.lr=0.1"],
    "lamb": ["train.optimizer=lamb", "train.lr=0.02", "train.weight_decay=0.1", "train.adam_eps=1e-6"],
}
ONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=8"]
LAYOUTS = {
    "replicas": ["parallel.data=2", "parallel.pipeline=1", "parallel.micro_batch_size=2"],
    "shares": [
        *("parallel.data=2", "parallel.pipeline=1", "parallel.shares=3-1", "parallel.micro_batch_size=2"),
        "parallel.sharded_optimizer=true",
    ],
    "sharded": [
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2"),
        "parallel.sharded_optimizer=true",
    ],
    "unlike-stages": [
        *("parallel.pipeline=2", "parallel.partition=1-2", "parallel.replicas=2-1", "parallel.tensor=1-2"),
        *("parallel.micro_batch_size=2", "parallel.sharded_optimizer=true"),
    ],
    "all-at-once": [
        *("parallel.data=2", "parallel.pipeline=2", "parallel.tensor=2", "parallel.partition=2-1"),
        *("parallel.micro_batch_size=2", "parallel.sharded_optimizer=true", "parallel.sequence_parallel=true"),
        "model.vocab_multiple=8",
    ],
}
TRIED = cases.covering(
    product(OPTIMIZERS, LAYOUTS),
    lambda case: {case[1], (case[0], "parallel.sharded_optimizer=true" in LAYOUTS[case[1]])},
    always=[("lamb", "unlike-stages"), ("lamb", "all-at-once")],
)
"""LAMB needs the norm of every whole parameter."""
Found = tuple[np.ndarray, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """The losses and the final state of a textbook loop, by optimizer."""

    @cache
    def of(optimizer: str) -> Found:
        folder = tmp_path_factory.mktemp("reference") / "run"
        return textbook(make_run(folder, corpus, *ONE, *OPTIMIZERS[optimizer]).plan, corpus)

    return of


def assert_equal(
    run: EngineRun, losses: np.ndarray, state: dict[str, torch.Tensor], rtol: float, tolerance: float
) -> None:
    np.testing.assert_allclose(run.losses(), losses, rtol=rtol, atol=tolerance)
    found = run.state()
    assert found.keys() == state.keys()
    for name, expected in state.items():
        torch.testing.assert_close(found[name], expected[: len(found[name])], rtol=rtol, atol=tolerance, msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_alone_it_equals_the_textbook(
    optimizer: str, reference: Callable[[str], Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*ONE, *OPTIMIZERS[optimizer])
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(optimizer), 1e-6, 1e-6)


@pytest.mark.parametrize(("optimizer", "layout"), TRIED)
def test_every_layout_equals_the_textbook(
    optimizer: str, layout: str, reference: Callable[[str], Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*LAYOUTS[layout], *OPTIMIZERS[optimizer])
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(optimizer), 1e-5, 1e-5)


@pytest.mark.parametrize("optimizer", cases.drawn(OPTIMIZERS, 0, always=["sgd", "lamb"]))
def test_another_layout_goes_on_from_its_checkpoint(
    optimizer: str, reference: Callable[[str], Found], engine_run: Callable[..., EngineRun]
) -> None:
    """Nesterov's state is that of SGD, and Adam's that of LAMB."""
    options = [*OPTIMIZERS[optimizer], "train.lr_decay_iterations=4"]
    half = engine_run(*LAYOUTS["sharded"], *options, "train.iterations=2", name="half")
    assert half.go() == 0, half.stderr()
    run = half.replan(*LAYOUTS["all-at-once"], *options)
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(optimizer), 1e-5, 1e-5)


def test_the_state_of_another_optimizer_is_refused_but_not_bare_weights(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*ONE, *OPTIMIZERS["sgd"], "train.iterations=2")
    assert run.go() == 0, run.stderr()
    model = run.plan.model.identity()
    assert to_load(run.run.path, model, run.plan.train, 4).meta.optimizer == "sgd"
    with pytest.raises(EngineError, match=r"has the state of train.optimizer=sgd, which train.optimizer=lamb cannot"):
        to_load(run.run.path, model, replace(run.plan.train, optimizer="lamb"), 4)
    again = run.replan(*ONE)
    assert again.go() == 1
    assert "use train.optimizer=sgd, or take the weights alone" in again.errors()[0]["message"]
