"""Compiled layers meet the versions of the weights that plain ones do.

Which weights a graph reads is decided before code is generated, which takes most of the time and is left out here:
`tests/megatron_ext/engine/test_compile.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_ext.engine.results import StepResult
from megatron_ext.engine.streams.streaming import StreamingEngine
from tests.megatron_ext.engine.streams.test_streams_agree import SGD, Case, assert_as_delayed
from tests.support.megatron_ext.engine_run import EngineRun


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case((2, 1), "stashing", SGD), Case((1, 1, 1), "latest", SGD)], ids=str)
def test_compiled_layers_learn_the_same(
    engine_run: Callable[..., EngineRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """And are compiled once, not for every version."""
    step = StreamingEngine.step

    def counted(self: StreamingEngine, iteration: int, **others: Any) -> StepResult:
        result = step(self, iteration, **others)
        (tmp_path / f"{self._place.rank}-{iteration}").write_text(str(counters["stats"]["unique_graphs"]))
        return result

    monkeypatch.setattr(StreamingEngine, "step", counted)  # the ranks are forked from this process
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run = engine_run(*case.overrides(), "train.compile=true", "train.comm_timeout_s=300")
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)
    for rank in range(sum(case.replicas)):
        graphs = [(tmp_path / f"{rank}-{iteration}").read_text() for iteration in (1, run.plan.train.iterations)]
        assert graphs[0] == graphs[1] != "0"
