"""Compiled layers compute what plain ones do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_ext.engine.engine import Engine
from megatron_ext.engine.results import StepResult
from tests.support.megatron_ext.engine_run import EngineRun

TINY = (
    "parallel.data=1",
    "parallel.pipeline=1",
    "parallel.micro_batch_size=8",
    "model.layers=3",
    "train.iterations=2",
    "train.checkpoint=false",
)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, by which torch.compile compiles for a CPU: install a C++ compiler"
)
def test_compiled_layers_give_the_same_losses(
    engine_run: Callable[..., EngineRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine_run(*TINY)
    assert plain.go() == 0, plain.stderr()
    real, graphs, before = torch.compile, tmp_path / "graphs", tmp_path / "before"
    step = Engine.step

    def watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = real(function)

        def call(*arguments: Tensor) -> Tensor:
            result = compiled(*arguments)
            graphs.write_text(str(counters["stats"]["unique_graphs"]))
            return result

        return call

    def first(self: Engine, iteration: int) -> StepResult:
        if iteration == 1:
            before.write_text(str(counters["stats"]["unique_graphs"]))
        return step(self, iteration)

    monkeypatch.setattr(torch, "compile", watched)  # the ranks are forked from this process
    monkeypatch.setattr(Engine, "step", first)
    compiled = engine_run(*TINY, "train.compile=true", name="compiled")
    assert compiled.go() == 0, compiled.stderr()
    assert before.read_text() == "1", "while a stage compiles, the others would wait for its message"
    assert graphs.read_text() == "1", "one layer is like another"
    np.testing.assert_allclose(compiled.losses(), plain.losses(), rtol=0, atol=1e-5)
