"""Copies of a model that share its weights, and run micro-batches in threads, train the model of a plain process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.engine.engine import Engine
from megatron_ext.tasks.task import Micro, Tensors
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT, assert_equal
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.textbook import textbook

BATCH = ["parallel.global_batch_size=12", "parallel.pipeline=1", *DROPOUT]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    one = ["parallel.data=1", "parallel.micro_batch_size=12"]
    return textbook(make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *BATCH, *one).plan, corpus)


def test_losses_and_weights_equal_one_process_while_two_micro_batches_are_under_way_at_once(
    engine_run: Callable[..., EngineRun],
    reference: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, both = Engine._loss, threading.Barrier(2)

    def met(self: Engine, left: Tensors, micro: Micro) -> torch.Tensor:
        both.wait(120)  # a thread alone would wait for ever
        return plain(self, left, micro)

    monkeypatch.setattr(Engine, "_loss", met)  # the rank is forked from this process
    run = engine_run(*BATCH, "parallel.data=1", "parallel.micro_batch_size=2", "parallel.streams=2")
    assert run.plan.streams == [2]
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["parallel.shares=4-2", "parallel.streams=2-1", "parallel.recompute=full"], id="2-1"),
        pytest.param(["parallel.shares=3-3", "parallel.streams=3", "parallel.sharded_optimizer=true"], id="3-3"),
    ],
)
def test_unequal_replicas_with_streams_equal_one_process(
    engine_run: Callable[..., EngineRun], reference: tuple[np.ndarray, dict[str, torch.Tensor]], options: list[str]
) -> None:
    run = engine_run(*BATCH, "parallel.data=2", "parallel.micro_batch_size=2", *options)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)
