"""The blocks of a model of transformers that no profile knows are counted, so that it is planned without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.costs import counted_blocks
from fasop.errors import SearchError
from fasop.simulation.predict import predict
from tests.support.megatron_ext.tiny_transformers import working


def words(folder: Path, *others: str) -> list[str]:
    config = working("qwen2")
    file = folder / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "model_type": config.model_type}, default=str))
    return [
        "model=huggingface",
        f"model.config={file}",
        "model.sequence_length=16",
        "cluster.gpus.cpu.name=GPU",
        *others,
    ]


def test_memory_and_time_are_predicted_without_a_profile(tmp_path: Path) -> None:
    layout = ("parallel.pipeline=2", "parallel.partition=1-3", "parallel.data=1", "parallel.tensor=1")
    batches = ("parallel.micro_batch_size=2", "parallel.global_batch_size=4", "train.precision=bf16")
    found = predict(compose(words(tmp_path, *layout, *batches)))
    assert str(found.basis) == "not measured"
    assert found.iteration_s > 0
    first, last = found.stages
    config = working("qwen2")
    parameters = (first.memory.weights.of(1) + last.memory.weights.of(3)) / 2
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    of_model = sum(one.numel() for one in _whole(config))
    assert parameters == pytest.approx(of_model + tied, rel=0.01)  # and the angles of positions


def _whole(config: object) -> list[object]:
    from tests.support.megatron_ext.tiny_transformers import whole

    return [*whole(config).parameters()]


def test_what_cannot_be_counted_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_blocks, "COUNTER", "megatron_ext.nothing")
    with pytest.raises(
        SearchError, match=r"cannot be counted here: .*nothing.*; measure its blocks with 'tdpp profile"
    ):
        predict(compose(words(tmp_path, "parallel=single", "parallel.partition=4")))
