"""Every layout trains the same translation models: losses, weights and moments equal one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.engine import engine
from megatron_ext.parallel import cross_entropy
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pairs import PairLoss, write_pairs
from tests.support.megatron_ext.textbook import trained

COMMON = ("model.decoder_sequence_length=20", "model.label_smoothing=0.1", "model.hidden_dropout=0.3")
SINUSOIDAL = ("model.family=transformer", "model.position_embedding_type=sinusoidal", "model.layers=2", *COMMON)
LSTM = ("model.family=gnmt", "model.position_embedding_type=none", "model.heads=1", "model.layers=3", *COMMON)
MODELS = {
    "transformer": (*SINUSOIDAL, "model.decoder_layers=3", "model.attention_dropout=0.2"),
    "gnmt": (*LSTM, "model.decoder_layers=3"),
    "untied-transformer": (*SINUSOIDAL, "model.untie_embeddings_and_output_weights=true"),
    "untied-gnmt": (*LSTM, "model.untie_embeddings_and_output_weights=true"),
}
LAYOUTS: dict[str, list[tuple[Layout, str]]] = {
    "transformer": [
        (Layout(1, 1, 1, "5", 8), ""),
        (Layout(1, 2, 2, "2-3", 2), ""),
        (Layout(1, 2, 3, "1-3-1", 1, sharded_optimizer=True), "2-1"),
        (Layout(2, 2, 2, "1-4", 2, True, "full", True), ""),
        (Layout(4, 1, 2, "3-2", 2), ""),
        (Layout(2, 1, 2, "3-2", 2, True, "selective", schedule="zb_h1"), ""),
        (Layout("1-2-1", 1, 3, "1-3-1", 1, True, "full", replicas="3-1-2"), ""),
        (Layout("2-1", 1, 2, "2-3", 2, replicas="1-2"), ""),
        (Layout(1, 1, 2, "1-0-2-2", 4, schedule="interleaved", chunks=2), ""),
    ],
    "gnmt": [
        (Layout(1, 1, 1, "6", 8), ""),
        (Layout(1, 2, 2, "1-5", 2), ""),
        (Layout(1, 2, 1, "6", 2, streams="2-1"), "2-1"),
        (Layout(1, 2, 2, "4-2", 1, sharded_optimizer=True), "2-1"),
        (Layout(1, 1, 3, "2-3-1", 2, recompute="full"), ""),
        (Layout(1, 2, 3, "3-1-2", 1, recompute="selective", schedule="gpipe"), ""),
        (Layout(1, 1, 2, "4-2", 2, schedule="zb_h1"), ""),
        (Layout(1, 1, 3, "2-3-1", 1, replicas="3-1-2"), ""),
        (Layout(1, 1, 2, "4-2", 2, recompute="full", replicas="1-2"), ""),
        (Layout(1, 1, 2, "1-3-1-1", 4, schedule="interleaved", chunks=2), ""),
    ],
    "untied-transformer": [(Layout(2, 1, 3, "1-1-2", 4), "")],
    "untied-gnmt": [(Layout(1, 2, 2, "3-3", 4), "")],
}
SHARED = ("parallel.global_batch_size=6",)
"""Three micro-batches of two, so that replicas can have unequal shares."""


ALL = [(model, layout, shares) for model, layouts in LAYOUTS.items() for layout, shares in layouts]
FIRST = [case for case in ALL if case[1] in (LAYOUTS[case[0]][-1][0], LAYOUTS[case[0]][:2][-1][0])]
"""`make test-fast` tries these."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), 61)


Found = tuple[np.ndarray, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Found]:
    """Of a textbook loop over one module, by model and whether its global batch can be shared by thirds."""
    found: dict[tuple[str, bool], Found] = {}

    def of(model: str, by_thirds: bool) -> Found:
        if (model, by_thirds) not in found:
            batch = SHARED if by_thirds else ()
            folder = tmp_path_factory.mktemp("reference") / "run"
            run = make_run(folder, pairs, "parallel=single", *MODELS[model], *batch)
            found[model, by_thirds] = trained(run.plan, PairLoss(run.plan))
        return found[model, by_thirds]

    return of


def overrides(model: str, layout: Layout, shares: str) -> list[str]:
    found = [*MODELS[model], *(f"parallel.{key}={value}" for key, value in layout._asdict().items())]
    return [*found, *SHARED, f"parallel.shares={shares}"] if shares else found


def assert_equal(run: EngineRun, expected: Found) -> None:
    losses, state = expected
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    found = run.state()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        tolerance = 1e-5 if name.startswith("weights/") else max(1e-3 * tensor.abs().max().item(), 1e-12)
        whole = tensor[: len(found[name])]  # a vocabulary's padding is never used
        torch.testing.assert_close(
            found[name], whole, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("model", "layout", "shares"),
    [
        pytest.param(*case, marks=pytest.mark.fast if case in FIRST else pytest.mark.slow)
        for case in cases.covering(
            ALL, lambda case: {*options(case[1]), (case[0], case[1].pipeline), ("shares", case[2])}, always=FIRST
        )
    ],
    ids=str,
)
def test_losses_and_weights_equal_the_single_process(
    tmp_path: Path,
    pairs: Path,
    reference: Callable[[str, bool], Found],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    layout: Layout,
    shares: str,
) -> None:
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # so that gradients are summed during the backward pass
    run = make_run(tmp_path / "run", pairs, *overrides(model, layout, shares))
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(model, bool(shares)))


def test_losses_computed_of_some_logits_at_a_time_are_the_same(
    tmp_path: Path, pairs: Path, reference: Callable[[str, bool], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "PART", 200)
    run = make_run(tmp_path / "run", pairs, *overrides("gnmt", *LAYOUTS["gnmt"][1]))
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference("gnmt", False))


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_a_run_goes_on_under_another_layout(
    tmp_path: Path, pairs: Path, reference: Callable[[str, bool], Found], model: str
) -> None:
    run = make_run(
        tmp_path / "run",
        pairs,
        *overrides(model, *LAYOUTS[model][1]),
        "train.iterations=2",
        "train.lr_decay_iterations=4",
    )
    assert run.go() == 0, run.stderr()
    rest = run.replan(*overrides(model, *LAYOUTS[model][-1]))
    assert rest.go() == 0, rest.stderr()
    assert_equal(rest, reference(model, False))
