"""Every family is evaluated alike under every layout, and its training does not notice it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.megatron_ext.engine.test_awd_lm_agrees import MODELS as LSTMS
from tests.megatron_ext.engine.test_images_agree import MODELS as IMAGES
from tests.megatron_ext.engine.test_images_agree import SIZES
from tests.megatron_ext.engine.test_mamba_agrees import SIZES as MAMBA
from tests.megatron_ext.engine.test_s2vt_agrees import MODELS as CAPTIONS
from tests.megatron_ext.engine.test_translation_agrees import MODELS as TRANSLATION
from tests.megatron_ext.tasks.user.test_module import module_run
from tests.support import cases
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_corpus, make_run
from tests.support.megatron_ext.images import make_images
from tests.support.megatron_ext.pairs import write_pairs
from tests.support.megatron_ext.videos import write_videos

STILL = [
    *("train.iterations=2", "train.eval_interval=1", "train.lr=1e-7", "train.min_lr=0", "train.log_interval=1"),
    *(
        "train.lr_warmup_iterations=0",
        "train.comm_timeout_s=30",
        "parallel.global_batch_size=12",
        "parallel.partition=null",
        "parallel.schedule=gpipe",
    ),
]
"""Weights that hardly move: what layouts round differently does not grow. All have micro-batches of one size, in which
images are mixed and norms take their statistics."""
ONE = ["parallel=single", "parallel.micro_batch_size=4"]
LAYOUTS = {
    "shares": ["parallel.data=2", "parallel.pipeline=1", "parallel.micro_batch_size=4", "parallel.shares=2-1"],
    "stages": ["parallel.data=1", "parallel.pipeline=2", "parallel.micro_batch_size=4", "parallel.recompute=full"],
}
FAMILIES = ("vit", "resnet", "transformer", "gnmt", "awd_lm", "mamba", "s2vt", "Seq2Seq", "Translator")
TRIED = cases.covering(
    product(LAYOUTS, FAMILIES), lambda case: {case[1]}, always=[("shares", "resnet"), ("stages", "Seq2Seq")]
)


def made(family: str, folder: Path, *overrides: str) -> EngineRun:
    folder.mkdir()
    words = [*STILL, *overrides]
    if family in IMAGES:
        data = make_images(folder, SIZES.get(family, 8), count=27)
        return make_run(folder / "run", data, *IMAGES[family], *words, base=())
    if family in TRANSLATION:
        return make_run(folder / "run", write_pairs(folder, 61, longest=15), *TRANSLATION[family], *words)
    if family == "awd_lm":
        return make_run(folder / "run", make_corpus(folder), *LSTMS["tied"], "data.split='50,40,10'", *words)
    if family == "mamba":
        return make_run(folder / "run", make_corpus(folder), *MAMBA, "data.split='50,40,10'", *words)
    if family == "s2vt":
        return make_run(folder / "run", write_videos(folder, VOCAB), *CAPTIONS["two"], *words)
    return module_run(folder / "run", family, *words)


def evaluated(run: EngineRun) -> dict[str, float]:
    assert run.go() == 0, run.stderr()
    return {name: value for name, value in run.metrics()[-1].items() if name.startswith("valid_")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineRun]:
    found: dict[str, EngineRun] = {}

    def of(family: str) -> EngineRun:
        if family not in found:
            found[family] = made(family, tmp_path_factory.mktemp("alone") / family, *ONE)
            evaluated(found[family])
        return found[family]

    return of


@pytest.mark.parametrize(("layout", "family"), cases.fast_first(3, TRIED))
def test_every_layout_gives_the_same(
    alone: Callable[[str], EngineRun], tmp_path: Path, family: str, layout: str
) -> None:
    one = {name: value for name, value in alone(family).metrics()[-1].items() if name.startswith("valid_")}
    assert "valid_loss" in one
    if family in TRANSLATION:
        assert one.keys() == {"valid_loss", "valid_nll", "valid_accuracy", "valid_perplexity"}
    found = evaluated(made(family, tmp_path / family, *LAYOUTS[layout]))
    assert found == pytest.approx(one, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases.drawn(FAMILIES, 1, always=["resnet", "transformer", "awd_lm"]))
def test_training_does_not_notice_it(alone: Callable[[str], EngineRun], tmp_path: Path, family: str) -> None:
    run = made(family, tmp_path / family, *ONE, "train.eval_interval=null")
    assert run.go() == 0, run.stderr()
    assert run.losses().tolist() == alone(family).losses().tolist()
    state = alone(family).state()
    for name, tensor in run.state().items():
        assert torch.equal(tensor, state[name]), name
