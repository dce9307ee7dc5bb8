"""With samples of alike length beside each other every layout still trains what one plain process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from megatron_ext.contract.models.counts import flops_per_sample
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.megatron_ext.engine.test_translation_agrees import Found, assert_equal, overrides
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pairs import PairLoss, write_pairs
from tests.support.megatron_ext.textbook import trained

BATCHES, BATCH = 3, 6
SORTED = (f"data.bucketing={BATCHES}", f"parallel.global_batch_size={BATCH}", "train.iterations=7")
LAYOUTS: dict[str, list[tuple[Layout, str]]] = {
    "transformer": [
        (Layout(1, 1, 1, "5", 6), ""),
        (Layout(1, 2, 1, "5", 1), "2-4"),
        (Layout(1, 2, 3, "1-3-1", 1, sharded_optimizer=True), "2-4"),
        (Layout(2, 1, 2, "2-3", 2, True, "full"), ""),
        (Layout(1, 1, 3, "3-0-2", 2, recompute="selective", schedule="zb_h1"), ""),
        (Layout("1-2-1", 1, 3, "1-3-1", 1, True, replicas="3-1-2"), ""),
        (Layout(1, 1, 2, "1-1-2-1", 2, schedule="interleaved", chunks=2), ""),
    ],
    "gnmt": [
        (Layout(1, 2, 1, "6", 1), "4-2"),
        (Layout(1, 2, 2, "1-5", 1), "2-4"),
        (Layout(1, 1, 3, "2-3-1", 2, recompute="full", schedule="gpipe"), ""),
        (Layout(1, 1, 3, "2-2-2", 1, replicas="3-1-2"), ""),
    ],
}


def _place(sample: dict[str, np.ndarray]) -> tuple[int, int]:
    source, target = int(sample["enc_mask"].sum()), int(sample["loss_mask"].sum())
    return target, -source if target % 2 else source


class SortedLoss(PairLoss):
    """Of samples that are dealt out in plain words: a window sorted by target, then source, up and down by turns, in
    batches of any order."""

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run.plan)
        plain, window = self._samples, BATCHES * BATCH
        samples = run.plan.train.iterations * BATCH
        self._dealt: list[dict[str, np.ndarray]] = []
        plain._samples = -(-samples // window) * window
        for number in range(plain._samples // window):
            found = [plain.sample(one) for one in range(number * window, (number + 1) * window)]
            found.sort(key=_place)
            batches = [found[first : first + BATCH] for first in range(0, window, BATCH)]
            random = np.random.RandomState([run.plan.train.seed, number, 1])
            self._dealt += [one for place in random.permutation(BATCHES) for one in batches[place]]
        self._samples = self  # type: ignore[assignment]

    def batch(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Padded to the longest that there is."""
        picked = [self._dealt[number] for number in numbers]
        return {**{name: np.stack([one[name] for one in picked]) for name in picked[0]}, "number": numbers}

    def __call__(self, model: object, number: Tensor) -> Tensor:
        return super().__call__(model, number)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), 61)


@pytest.fixture(scope="module")
def reference(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    found: dict[str, Found] = {}

    def of(model: str) -> Found:
        if model not in found:
            words = overrides(model, Layout(1, 1, 1, "null", BATCH), "")
            run = make_run(tmp_path_factory.mktemp("reference") / "run", pairs, *words, *SORTED)
            found[model] = trained(run.plan, SortedLoss(run))
        return found[model]

    return of


def made(folder: Path, pairs: Path, model: str, layout: Layout, shares: str, *words: str) -> EngineRun:
    given = [f"parallel.shares={shares}"] if shares else []
    return make_run(folder / "run", pairs, *overrides(model, layout, ""), *SORTED, *given, *words)


@pytest.mark.parametrize(
    ("model", "layout", "shares"),
    cases.fast_first(
        2,
        cases.covering(
            [(model, *one) for model, layouts in LAYOUTS.items() for one in layouts],
            lambda case: {*options(case[1]), (case[0], case[1].pipeline)},
        ),
    ),
    ids=str,
)
def test_losses_and_weights_equal_the_single_process(
    tmp_path: Path, pairs: Path, reference: Callable[[str], Found], model: str, layout: Layout, shares: str
) -> None:
    run = made(tmp_path, pairs, model, layout, shares)
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_a_run_goes_on_in_the_middle_of_a_window_under_another_layout(
    tmp_path: Path, pairs: Path, reference: Callable[[str], Found], model: str
) -> None:
    first, last = LAYOUTS[model][1], LAYOUTS[model][-1]
    run = made(tmp_path, pairs, model, *first, "train.iterations=4", "train.lr_decay_iterations=7")
    assert run.go() == 0, run.stderr()
    words = [*overrides(model, last[0], ""), *SORTED]
    wrong = run.replan(*words, "parallel.global_batch_size=12", "train.iterations=5")
    assert wrong.go() != 0
    assert "expected global_batch_size=6; found global_batch_size=12" in wrong.stderr()
    rest = run.replan(*words)
    assert rest.go() == 0, rest.stderr()
    assert_equal(rest, reference(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_evaluations_give_the_same_as_without(tmp_path: Path, pairs: Path, model: str) -> None:
    """Of weights that hardly move."""
    still = ["train.iterations=1", "train.eval_interval=1", "train.lr=1e-9", "train.min_lr=0"]
    still.append("train.lr_warmup_iterations=0")
    found = []
    for name, words in (("sorted", []), ("plain", ["data.bucketing=null"])):
        (tmp_path / name).mkdir()
        run = made(tmp_path / name, pairs, model, LAYOUTS[model][1][0], LAYOUTS[model][1][1], *still, *words)
        assert run.go() == 0, run.stderr()
        found.append({key: value for key, value in run.metrics()[-1].items() if key.startswith("valid_")})
    assert found[0].keys() == {"valid_loss", "valid_nll", "valid_accuracy", "valid_perplexity"}
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_tokens_of_a_second_are_those_that_are_computed(tmp_path: Path, pairs: Path) -> None:
    layout, shares = LAYOUTS["transformer"][1]
    run = made(tmp_path, pairs, "transformer", layout, shares)
    assert run.go() == 0, run.stderr()
    dealt = SortedLoss(run)
    for number, line in enumerate(run.metrics()):
        batch = dealt.batch(np.arange(number * BATCH, (number + 1) * BATCH))
        tokens = sum(int(batch[mask].sum()) for mask in ("enc_mask", "loss_mask"))  # micro-batches of one: no padding
        assert line["tokens_per_s"] * line["elapsed_ms"] / 1e3 == pytest.approx(tokens)
        most = flops_per_sample(run.plan.model) * BATCH / run.plan.world_size / 1e12
        assert 0 < line["tflops_per_rank"] * line["elapsed_ms"] / 1e3 < most
