"""engine=megatron_core trains megatron.core's BERT and T5 as tdpp's own engine trains its own.

make test-megatron
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.contract.errors import EngineError
from megatron_ext.core.library import Library
from megatron_ext.core.settings import model_config
from megatron_ext.families.bert.task import BertTask
from megatron_ext.families.t5.task import T5Task
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, SINGLE
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.masked import masked_samples

pytest.importorskip("megatron", reason="megatron-core is not installed")

MODERN = ("model.position_embedding_type=rope", "model.normalization=RMSNorm", "model.swiglu=true")
MODELS = {
    "bert": ("model.family=bert", "model.layers=4"),
    "plain-bert": ("model.family=bert", "model.layers=4", "model.bert_binary_head=false", *MODERN),
    "t5": ("model.family=t5", "model.layers=2", "model.decoder_layers=3", "model.decoder_sequence_length=16"),
    "modern-t5": (
        *("model.family=t5", "model.layers=2", "model.decoder_layers=1", "model.add_bias_linear=false"),
        *("model.untie_embeddings_and_output_weights=true", *MODERN),
    ),
}
ONE_STAGE = {
    "sequence": (*SINGLE, "parallel.tensor=2", "parallel.sequence_parallel=true"),
    "sharded": (*SINGLE, "parallel.data=2", "parallel.sharded_optimizer=true"),
}
CASES = [
    *((model, name, LAYOUTS[name]) for model in ("bert", "plain-bert") for name in ("single", "uneven", "all")),
    *(("bert", name, LAYOUTS[name]) for name in ("tensor", "interleaved", "recomputed", "core-recomputed")),
    *((model, name, layout) for model in ("t5", "modern-t5") for name, layout in ONE_STAGE.items()),
    *(("t5", name, LAYOUTS[name]) for name in ("single", "tensor", "data", "recomputed")),
]
VOCABULARY = "model.vocab_size=63"


def trained(folder: Path, corpus: Path, *words: str) -> EngineRun:
    run = make_run(folder, corpus, *words)
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture(scope="module", autouse=True)
def samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for task in (BertTask, T5Task):
            patch.setattr(task, "samples", masked_samples)  # the ranks are forked from this process
        yield


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, corpus: Path, samples: None) -> dict[str, EngineRun]:
    """Runs of tdpp's own engine on one process, by model."""
    return {
        model: trained(tmp_path_factory.mktemp(model), corpus, *SINGLE, *words, VOCABULARY)
        for model, words in MODELS.items()
    }


@pytest.mark.parametrize(("model", "name", "layout"), CASES, ids=[f"{model}-{name}" for model, name, _ in CASES])
def test_losses_and_weights_are_those_of_tdpps_own_engine(
    tmp_path: Path, corpus: Path, ours: dict[str, EngineRun], model: str, name: str, layout: tuple[str, ...]
) -> None:
    theirs = trained(tmp_path / "run", corpus, MEGATRON, *MODELS[model], *layout, VOCABULARY)
    assert len(theirs.losses()) == 4
    np.testing.assert_allclose(theirs.losses(), ours[model].losses(), rtol=0, atol=1e-5)
    found, expected = theirs.weights(), ours[model].weights()
    assert found.keys() == expected.keys()
    for weight, tensor in expected.items():
        torch.testing.assert_close(
            found[weight], tensor, rtol=0, atol=1e-4, msg=lambda text, at=weight: f"{at}: {text}"
        )


GPUS = {
    "A100": (
        (8, 0),
        (),
        "A100 has compute capability 8.0, and FP8 needs 8.9 (L4, L40, H100); leave it out: train.prec",
    ),
    "H100, BERT": ((9, 0), MODELS["bert"], "fp8=hybrid: layers of model.family=bert have no FP8 here; leave it out"),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_or_a_model_without_fp8_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    capability, words, refused = GPUS[gpu]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    run = make_run(tmp_path / "run", corpus, MEGATRON, *SINGLE, *words, "+engine.options.fp8=hybrid")
    with pytest.raises(EngineError, match=re.escape(refused)):
        model_config(run.plan, Library((0, 16, 1), transformer_engine=True))


def test_a_gpu_with_fp8_has_it(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    run = make_run(tmp_path / "run", corpus, MEGATRON, *SINGLE, "+engine.options.fp8=hybrid")
    assert model_config(run.plan, Library((0, 16, 1), transformer_engine=True)).fp8 == "hybrid"
