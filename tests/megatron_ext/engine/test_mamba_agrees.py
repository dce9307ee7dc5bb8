"""Every layout trains the same Mamba: losses, weights and moments equal one plain process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.megatron_ext.engine.test_layouts_agree import Layout, assert_equal
from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.textbook import textbook

SIZES = (
    *("model.family=mamba", "model.position_embedding_type=none", "model.normalization=RMSNorm", "model.heads=1"),
    "parallel=single",
)
LAYOUTS = [
    Layout(1, 2, 2, "1-2", 2),
    Layout(1, 1, 3, "1-1-1", 2, schedule="zb_h1"),
    Layout(1, 2, 1, "3", 1, recompute="full", sharded_optimizer=True),
    Layout(1, 1, 2, "1-0-1-1", 2, schedule="interleaved", chunks=2),
    Layout(1, 1, 3, "0-2-1", 1, recompute="full", replicas="1-2-1"),
    Layout(1, 1, 2, "3-0", 4, schedule="gpipe"),
]
FIRST = LAYOUTS[:1]
"""`make test-fast` tries these."""


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    plan = make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *SIZES).plan
    return textbook(plan, corpus)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.fast if each in FIRST else pytest.mark.slow) for each in LAYOUTS],
    ids=str,
)
def test_losses_and_weights_equal_the_single_process(
    tmp_path: Path, corpus: Path, reference: tuple[np.ndarray, dict[str, torch.Tensor]], layout: Layout
) -> None:
    words = [f"parallel.{key}={value}" for key, value in layout._asdict().items()]
    run = make_run(tmp_path / "run", corpus, *SIZES, *words)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference)


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(
    tmp_path: Path, corpus: Path, reference: tuple[np.ndarray, dict[str, torch.Tensor]]
) -> None:
    first, second = ([f"parallel.{key}={value}" for key, value in each._asdict().items()] for each in LAYOUTS[:2])
    run = make_run(tmp_path / "run", corpus, *SIZES, *first, "train.iterations=2", "train.lr_decay_iterations=4")
    assert run.go() == 0, run.stderr()
    rest = run.replan(*SIZES, *second, "train.lr_decay_iterations=4")
    assert rest.go() == 0, rest.stderr()
    assert_equal(rest, reference)
