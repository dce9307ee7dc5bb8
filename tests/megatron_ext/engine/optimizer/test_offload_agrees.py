"""An optimizer whose state lies in the host's memory trains as one whose state does not, and as torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.compose import compose
from conf.errors import ConfigError
from megatron_ext.contract import parallel_config
from megatron_ext.engine import engine as engine_module
from tests.megatron_ext.engine.optimizer.test_optimizers_agree import LAYOUTS, ONE, OPTIMIZERS, assert_equal
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pretended_gpus import pretended_gpus
from tests.support.megatron_ext.textbook import textbook

OFFLOADED = "parallel.offload=optimizer"
Found = tuple[np.ndarray, dict[str, torch.Tensor]]
CASES = {
    "alone": (ONE, "adam"),
    "alone-sgd": (ONE, "sgd"),
    "replicas": (LAYOUTS["replicas"], "nesterov"),
    "shares": (LAYOUTS["shares"], "adam"),
    "unlike-stages": (LAYOUTS["unlike-stages"], "adam"),
    "all-at-once": (LAYOUTS["all-at-once"], "nesterov"),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model has many."""
    monkeypatch.setattr(parallel_config, "PIECE", 4096)


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """The losses and the final state of a textbook loop, by its options."""

    @cache
    def of(*options: str) -> Found:
        folder = tmp_path_factory.mktemp("reference") / "run"
        return textbook(make_run(folder, corpus, *ONE, *options).plan, corpus)

    return of


@pytest.mark.parametrize(("layout", "optimizer"), CASES.values(), ids=CASES.keys())
def test_every_layout_equals_the_textbook(
    layout: list[str], optimizer: str, reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    run = engine_run(*layout, *OPTIMIZERS[optimizer], OFFLOADED)
    assert run.plan.offload == "optimizer"
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*OPTIMIZERS[optimizer]), 1e-5, 1e-5)


def test_a_run_goes_on_with_and_without_it(
    reference: Callable[..., Found], engine_run: Callable[..., EngineRun]
) -> None:
    options = [*OPTIMIZERS["adam"], "train.lr_decay_iterations=4"]
    half = engine_run(*LAYOUTS["sharded"], *options, OFFLOADED, "train.iterations=2", name="half")
    assert half.go() == 0, half.stderr()
    run = half.replan(*LAYOUTS["replicas"], *options)
    assert run.go() == 0, run.stderr()
    assert_equal(run, *reference(*OPTIMIZERS["adam"]), 1e-5, 1e-5)
    again = half.replan(*LAYOUTS["all-at-once"], *options, OFFLOADED)
    assert again.go() == 0, again.stderr()
    assert_equal(again, *reference(*OPTIMIZERS["adam"]), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.sharded_optimizer=true", "train.precision=bf16"],
        ["parallel.sharded_optimizer=false", "train.precision=bf16"],
        ["parallel.sharded_optimizer=false", "train.clip_grad=0"],
    ],
    ids=["sharded", "all-in-16-bits", "bucket-by-bucket"],
)
def test_pretended_gpus_give_the_same_bits(
    words: list[str], engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the average of the weights, in 16 bits, where fp32 weights are offloaded, too, and where weights are updated
    while gradients are summed."""
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 4096)
    words = ["cluster.gpus.cpu.name=GPU", *LAYOUTS["replicas"], *words, "train.ema=0.5"]
    plain, offloaded = engine_run(*words, name="plain"), engine_run(*words, OFFLOADED, name="offloaded")
    for run in (plain, offloaded):
        assert run.go(pretended_gpus()) == 0, run.stderr()
    assert [line["loss"] for line in offloaded.metrics()] == [line["loss"] for line in plain.metrics()]
    expected, found = plain.state(), offloaded.state()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.optimizer=lamb"], "offload=optimizer cannot be combined with train.optimizer=lamb"),
        (["parallel.schedule=pipedream"], "offload=optimizer cannot be combined with parallel.schedule=pipedream"),
        (["engine=megatron_core"], "parallel.offload=optimizer must be none with engine=megatron_core"),
    ],
    ids=["lamb", "pipedream", "megatron_core"],
)
def test_what_cannot_be_offloaded_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        compose(["model=tiny", OFFLOADED, *words])
