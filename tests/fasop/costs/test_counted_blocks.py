"""The blocks of a model of transformers that no profile knows are counted, so that it is planned without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from fasop.costs import counted_blocks
from fasop.costs.measured_module import BlockCounts, MeasuredBlock, MeasuredModule
from fasop.costs.memory.stages import stage_memory
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.simulation.predict import predict
from tests.support.megatron_ext.tiny_transformers import working

MIB = 2**20


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


def test_layers_are_gone_when_the_backward_pass_comes_to_the_embedding(tmp_path: Path) -> None:
    def block(name: str, held: str | None, kept: int, passing: int) -> MeasuredBlock:
        of: dict[str, Any] = {"parameters": 0, "fixed_bytes": 0, "kept": (kept * MIB,), "given": (kept * MIB,)}
        of_pass = (passing * MIB,)
        counts = BlockCounts(
            passing=of_pass, passing_again=of_pass, dropped=(0,), operations=(1,), traffic=(1,), kernels=1
        )
        return MeasuredBlock(name=name, kind=name.partition(".")[0], held=held, counts=counts, **of)

    layers = [block(f"layer.{number}", None, 100, 50) for number in range(4)]
    ends = block("embedding", "first", 10, 1000), block("head", "last", 0, 10), block("loss()", "last", 0, 0)
    training = Training.of(compose(words(tmp_path, "parallel=single", "parallel.micro_batch_size=1")))
    module = MeasuredModule(
        training.model,
        digest="",
        sequence=[ends[0], *layers, *ends[1:]],
        sizes=(1,),
        crossing=[(0,)] * 5,
        wires=[],
        tied_parameters=0,
        tied_blocks=0,
        always=7 * MIB,
    )
    activations = stage_memory(replace(training, model=module), 0).activations
    found = [activations.of(count) / MIB for count in range(1, 13)]
    assert found == pytest.approx([17 + max(1000, 100 * count + 50) for count in range(1, 13)], abs=1e-3)
