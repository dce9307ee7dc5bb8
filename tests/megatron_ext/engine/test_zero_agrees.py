"""Replicas that keep a share of the gradients alone train as one process, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.engine import engine as engine_module
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.engine.gradients.share import WholeWeights
from tests.megatron_ext.engine.optimizer.test_optimizers_agree import ONE, assert_equal
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pretended_gpus import pretended_gpus
from tests.support.megatron_ext.textbook import textbook

SCATTERED, GATHERED = "parallel.zero=2", "parallel.zero=3"
TWO = ["parallel.data=2", "parallel.pipeline=1", "parallel.micro_batch_size=2"]
STAGES = ["parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=1"]
TENSOR = ["parallel.tensor=2", "parallel.sequence_parallel=true", "model.vocab_multiple=8"]
CASES = {
    "replicas": TWO,
    "four": ["parallel.data=4", "parallel.pipeline=1", "parallel.micro_batch_size=1"],
    "alone": ["parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2"],
    "untied": [*TWO, "model.untie_embeddings_and_output_weights=true"],
    "stages": STAGES,
    "without-layers": [*STAGES, "parallel.pipeline=3", "parallel.partition=0-3-0"],
    "gpipe": [*STAGES, "parallel.schedule=gpipe"],
    "zb_h1": [*STAGES, "parallel.schedule=zb_h1", "parallel.recompute=full:1"],
    "interleaved": [*STAGES, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-0-1-1"],
    "tensor": [*STAGES, *TENSOR, "parallel.recompute=full"],
    "tensor-alone": [*TWO, "parallel.tensor=2", "model.vocab_multiple=8"],
    "tensor-by-stage": [*STAGES, *TENSOR, "parallel.tensor=1-2"],
    "shares": [*TWO, "parallel.shares=3-1", "parallel.micro_batch_size=1"],
    "shares-of-stages": [*STAGES, "parallel.shares=5-3"],
    "shares-zb_h1": [*STAGES, "parallel.shares=6-2", "parallel.schedule=zb_h1"],
    "offloaded": [*STAGES, "parallel.offload=optimizer"],
    "everything": [
        *(*STAGES, *TENSOR, "parallel.shares=3-1", "parallel.recompute=full:1", "parallel.offload=optimizer"),
        "parallel.schedule=zb_h1",
    ],
    "dropout": [*STAGES, "model.hidden_dropout=0.3", "model.attention_dropout=0.2"],
    "clipped": [*TWO, "train.clip_grad=0.1"],
}
Found = tuple[np.ndarray, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """The losses and the final state of a textbook loop, by its options."""

    @cache
    def of(*options: str) -> Found:
        folder = tmp_path_factory.mktemp("reference") / "run"
        return textbook(make_run(folder, corpus, *ONE, *options).plan, corpus)

    return of


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model has many; the ranks are forked from this process."""
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 4096)


def of_reference(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("parallel.") or "global_batch_size" in word]


@pytest.mark.parametrize("words", CASES.values(), ids=CASES.keys())
def test_every_layout_equals_the_textbook(
    words: list[str], reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*words, SCATTERED)
    assert (run.plan.zero, run.plan.sharded_optimizer) == (2, True)
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*of_reference(words)), 1e-5, 1e-5)


GATHERED_CASES = {
    **{name: words for name, words in CASES.items() if not any("shares" in word for word in words)},
    "three": [*TWO, "parallel.data=3", "parallel.global_batch_size=24"],
    "gpipe-recomputed": [*STAGES, "parallel.schedule=gpipe", "parallel.recompute=full"],
    "interleaved-recomputed": [
        *(*STAGES, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-0-1-1"),
        "parallel.recompute=full:1",
    ],
    "offloaded-activations": [*STAGES, "parallel.offload=activations"],
    "offloaded-both": [*TWO, "parallel.offload=both"],
    "lamb": [*STAGES, "train.optimizer=lamb", "train.lr=0.02"],
}


@pytest.mark.parametrize("words", GATHERED_CASES.values(), ids=GATHERED_CASES.keys())
def test_replicas_that_keep_a_share_of_the_weights_equal_the_textbook(
    words: list[str], reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*words, GATHERED)
    assert (run.plan.zero, run.plan.sharded_optimizer) == (3, True)
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*of_reference(words)), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "words",
    [["train.precision=bf16"], ["parallel.compress=int8"], ["parallel.reduce_dtype=bf16"]],
    ids=["bf16", "compressed", "summed-in-bf16"],
)
@pytest.mark.parametrize("kept", [SCATTERED, GATHERED])
def test_what_rounds_trains_as_with_a_sharded_optimizer(
    kept: str, words: list[str], engine_run: Callable[..., EngineRun]
) -> None:
    """But for the order of sums."""
    sharded = engine_run(*STAGES, *words, "parallel.zero=1", name="sharded")
    scattered = engine_run(*STAGES, *words, kept, name="scattered")
    for run in (sharded, scattered):
        assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(scattered.losses(), sharded.losses(), rtol=2e-3)


@pytest.mark.parametrize("layout", [TWO, STAGES], ids=["replicas", "stages"])
def test_evaluations_of_gathered_weights_and_their_average_are_those_of_whole_ones(
    layout: list[str], engine_run: Callable[..., EngineRun]
) -> None:
    """Also where a replica has fewer micro-batches to evaluate than another one."""
    words = [*layout, "train.ema=0.9", "train.eval_interval=2", "data.split='80,20,0'"]
    whole, gathered = (engine_run(*words, f"parallel.zero={zero}", name=f"zero-{zero}") for zero in (1, 3))
    for run in (whole, gathered):
        assert run.go() == 0, run.stderr()
    one, other = ([line for line in run.metrics() if "valid_loss" in line] for run in (whole, gathered))
    assert [line["valid_loss"] for line in other] == pytest.approx([line["valid_loss"] for line in one], rel=1e-5)
    assert len(one) == 2
    before, after = whole.state(), gathered.state()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [SCATTERED, GATHERED])
def test_a_run_goes_on_in_any_other_layout(
    kept: str, reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    options = ["train.lr_decay_iterations=4"]
    half = engine_run(*STAGES, *options, kept, "train.iterations=2", name="half")
    assert half.go() == 0, half.stderr()
    for name, words in {"plain": TWO, "sharded": [*TWO, "parallel.zero=1"], "kept": [*TWO, kept]}.items():
        run = half.replan(*words, *options)
        assert run.go() == 0, (name, run.stderr())
        assert_equal(run, *reference(), 1e-5, 1e-5)


def test_pretended_gpus_train_the_same(engine_run: Callable[..., EngineRun]) -> None:
    words = ["cluster.gpus.cpu.name=GPU", *STAGES]
    sharded = engine_run(*words, "parallel.zero=1", name="sharded")
    scattered = engine_run(*words, SCATTERED, name="scattered")
    gathered = engine_run(*words, GATHERED, name="gathered")
    for run in (sharded, scattered, gathered):
        assert run.go(pretended_gpus()) == 0, run.stderr()
    np.testing.assert_allclose(scattered.losses(), sharded.losses(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(gathered.losses(), sharded.losses(), rtol=0, atol=1e-5)


def test_no_rank_holds_the_gradients_of_its_stage(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It keeps its share, and at most two buckets that are summed and some to which gradients are added."""
    sums = FlatWeights.sums

    def counted(self: FlatWeights, bucket: int) -> torch.Tensor:
        found = sums(self, bucket)
        with (tmp_path / "held").open("a", encoding="ascii") as file:
            file.write(f"{sum(len(one) for one in self._sums.values())} {len(self.grad)}\n")
        return found

    monkeypatch.setattr(FlatWeights, "sums", counted)
    untied = "model.untie_embeddings_and_output_weights=true"
    run = engine_run("parallel.data=4", "parallel.pipeline=1", "parallel.micro_batch_size=1", untied, SCATTERED)
    assert run.go() == 0, run.stderr()
    whole = parameter_count(run.plan.model)
    held, kept = zip(*(map(int, line.split()) for line in (tmp_path / "held").read_text().splitlines()), strict=True)
    assert max(kept) == pytest.approx(whole / 4, rel=0.01)
    assert max(held) < whole / 3


def test_no_rank_holds_the_weights_of_its_stage(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It keeps its share and, of the rest, two blocks at most."""
    make = WholeWeights.make

    def counted(self: WholeWeights, bucket: int) -> torch.Tensor:
        made = make(self, bucket)
        with (tmp_path / "held").open("a", encoding="ascii") as file:
            file.write(f"{sum(one.untyped_storage().nbytes() for one in self._weights)}\n")
        return made

    monkeypatch.setattr(WholeWeights, "make", counted)
    run = engine_run(*TWO, "model.layers=8", "model.untie_embeddings_and_output_weights=true", GATHERED)
    assert run.go() == 0, run.stderr()
    model = run.plan.model
    layer = 12 * model.hidden**2 + 13 * model.hidden
    held = [int(line) for line in (tmp_path / "held").read_text().split()]
    assert max(held) == pytest.approx(4 * 2 * layer, rel=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.sync_every=4"], "zero=2 cannot be combined with train.sync_every=4"),
        (
            ["parallel.partition=4", "parallel.pipeline=1", "parallel.streams=2"],
            "zero=2 cannot be combined with parallel.streams=2",
        ),
        (["adapt.rebalance=true"], "zero=2 cannot be combined with adapt.rebalance=true"),
        (["elastic.enabled=true"], "zero=2 cannot be combined with elastic.enabled=true"),
        (
            ["parallel.pipeline=2", "parallel.replicas=2-1", "parallel.data=1"],
            "zero=2 cannot be combined with parallel.replicas=2-1",
        ),
        (["parallel.schedule_file=mine.json"], "zero=2 cannot be combined with parallel.schedule_file"),
        (["engine=megatron_core"], "parallel.zero=2 must be at most 1 with engine=megatron_core"),
        (["engine=megatron_lm", "engine.checkout=/tmp"], "parallel.zero=2: Megatron-LM"),
        (["parallel.schedule=pipedream"], "cannot be combined with parallel.schedule=pipedream"),
        (["parallel.zero=4"], "parallel.zero=4 must be at most 3"),
        (["parallel.zero=3", "parallel.shares=3-1"], "zero=3 cannot be combined with parallel.shares=3-1.*zero=2"),
        (
            ["parallel.zero=3", "parallel.hierarchical_reduce=true"],
            "zero=3 cannot be combined with parallel.hierarchical_reduce=true",
        ),
        (["parallel.zero=0", "parallel.sharded_optimizer=true"], "parallel.zero=0 cannot be combined with"),
        (
            [
                *("parallel.shares=3-1", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.pipeline=2"),
                "parallel.partition=1-1-1-1",
            ],
            "zero=2 cannot be combined with both parallel.chunks=2 and parallel.shares=3-1",
        ),
    ],
    ids=lambda one: one[-1].partition("=")[0] if isinstance(one, list) else "",
)
def test_what_does_not_go_with_it_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["model=tiny", "parallel.data=2", SCATTERED, *words])


def test_a_sharded_optimizer_is_its_first_stage() -> None:
    plain, named = (
        compose(["model=tiny", "parallel.data=2", word]).parallel
        for word in ("parallel.sharded_optimizer=true", "parallel.zero=1")
    )
    assert plain == named
