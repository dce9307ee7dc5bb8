"""BERT and T5 train on data of sentences, mixed and resumed, as GPT does on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.sentences import write_sentences

MODELS = {
    "bert": ("model.family=bert",),
    "t5": ("model.family=t5", "model.layers=2", "model.decoder_layers=1", "model.decoder_sequence_length=20"),
}
ONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=2")
TWO_STAGES = ("parallel.data=1", "parallel.pipeline=2", "parallel.micro_batch_size=2", "parallel.partition=1-2")


@pytest.mark.parametrize("family", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_blend_goes_on_under_another_layout_within_an_epoch(tmp_path: Path, family: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, prefix in enumerate((first, second)):
        write_sentences(prefix, seed, vocab_size=61, documents=40, longest=8)
    common = (
        *MODELS[family],
        f"data.blend=[{{prefix:{second},weight:0.4}}]",
        "data.mask_prob=0.3",
        "train.lr_decay_iterations=4",
    )
    whole = make_run(tmp_path / "whole", first, *common, *ONE)
    assert whole.go() == 0, whole.stderr()
    begun = make_run(tmp_path / "begun", first, *common, *ONE, "train.iterations=2")
    assert begun.go() == 0, begun.stderr()
    rest = make_run(tmp_path / "rest", first, *common, *TWO_STAGES, f"train.load={begun.run.path}")
    assert rest.go() == 0, rest.stderr()
    np.testing.assert_allclose([*begun.losses(), *rest.losses()], whole.losses(), rtol=1e-5)
    again = begun.replan(*common, *ONE, f"data.prefix={first}", "data.mask_prob=0.2", "train.iterations=4")
    assert again.go() != 0
    assert "mask_prob" in again.stderr()
