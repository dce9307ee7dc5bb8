"""Megatron-Core's format is read without running what its pickles name, and what does not fit is one message."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from launch import cli
from megatron_ext.checkpoints.converting import weights_of
from megatron_ext.checkpoints.foreign import megatron_names, torch_dist
from megatron_ext.checkpoints.foreign.weights import weights_at
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.model import ModelConfig
from tests.support.megatron_ext.engine_run import EngineRun, make_run


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> EngineRun:
    made = make_run(tmp_path_factory.mktemp("run") / "run", corpus, "parallel=single", "train.iterations=2")
    assert made.go() == 0, made.stderr()
    return made


@pytest.fixture
def saved(run: EngineRun, tmp_path: Path) -> Path:
    """Of a tiny GPT-2."""
    checkpoint = Checkpoint.at(run.run.path)
    (tmp_path / "saved").mkdir()
    megatron_names.save(tmp_path / "saved", checkpoint.meta.config(), partial(weights_of, checkpoint))
    return tmp_path / "saved"


def model_of(run: EngineRun) -> ModelConfig:
    return Checkpoint.at(run.run.path).meta.config()


def test_what_is_written_is_read_again(run: EngineRun, saved: Path) -> None:
    weights = megatron_names.Weights(saved, model_of(run))
    for part in ("embedding", "layer-00000", "layer-00002", "head"):
        expected = weights_of(Checkpoint.at(run.run.path), part, "weights")
        found = weights.part(part)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_torch_reads_what_is_written(run: EngineRun, saved: Path) -> None:
    theirs = {"embedding.word_embeddings.weight": torch.zeros(61, 32)}
    torch.distributed.checkpoint.load(theirs, checkpoint_id=saved / "release", no_dist=True)
    expected = weights_of(Checkpoint.at(run.run.path), "embedding", "weights")["word"]
    assert torch.equal(theirs["embedding.word_embeddings.weight"], expected)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_nothing_in_a_pickle_is_called(run: EngineRun, saved: Path, tmp_path: Path, file: str) -> None:
    evil = pickle.dumps(Evil(tmp_path / "called"))
    if file == ".metadata":
        (saved / "release" / file).write_bytes(evil)
    else:
        index = torch_dist.read_index(saved)
        chunk = index["embedding.word_embeddings.weight"].chunks[0]
        content = bytearray(chunk.file.read_bytes())
        content[chunk.begin : chunk.begin + chunk.length] = evil.ljust(chunk.length, b"\0")
        chunk.file.write_bytes(content)
    with pytest.raises(EngineError, match="cannot be read"):
        megatron_names.Weights(saved, model_of(run)).part("embedding")
    assert not (tmp_path / "called").exists()


def test_another_format_is_named(run: EngineRun, saved: Path) -> None:
    (saved / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(EngineError, match="expected the format torch_dist, found 'zarr'"):
        megatron_names.Weights(saved, model_of(run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.layers=2", "has 3 layers, the model has 2"),
        ("model.layers=4", "is not that of layer-00003"),
        ("model.hidden=64", "is not that of embedding word"),
        ("model.swiglu=true", "is not that of layer-00000 mlp_in.weight"),
        ("model.untie_embeddings_and_output_weights=true", "expected a tensor output_layer.weight"),
    ],
)
def test_a_launch_refuses_weights_of_another_model(
    saved: Path, tmp_path: Path, corpus: Path, change: str, message: str
) -> None:
    run = make_run(tmp_path / "run", corpus, "parallel=single", change, f"train.load={saved}")
    assert run.go() == 1
    assert message in run.errors()[0]["message"]


def test_a_run_of_megatron_lm_is_converted(
    run: EngineRun, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `checkpoints` is what Megatron-LM saved: a folder for each iteration, and the file that names the newest."""
    theirs = tmp_path / "theirs"
    shutil.copytree(run.run.path, theirs)
    shutil.rmtree(theirs / "checkpoints")
    shutil.copytree(saved / "release", theirs / "checkpoints" / "iter_0000002")
    (theirs / "checkpoints" / torch_dist.TRACKER).write_text("2")
    plan = json.loads((theirs / "plan.json").read_text())
    (theirs / "plan.json").write_text(json.dumps({**plan, "engine": "megatron_lm"}))
    for to in ("tdpp", "huggingface"):
        assert cli.main(["checkpoint", "convert", str(theirs), str(tmp_path / to), "--to", to]) == 0
        assert ("weights alone" in capsys.readouterr().err) == (to == "tdpp")
    words = ["checkpoint", "convert", str(theirs), str(tmp_path / "other"), "--to", "tdpp"]
    assert cli.main([*words, "--checkpoint", "iter_0000001"]) == 1
    assert "--checkpoint: " in capsys.readouterr().err
    expected = Checkpoint.at(run.run.path)
    found = {
        "tdpp": lambda part: weights_of(Checkpoint.at(tmp_path / "tdpp"), part, "weights"),
        "huggingface": weights_at(tmp_path / "huggingface", model_of(run)).part,
    }
    for name, part in product(found, ("embedding", "layer-00000", "layer-00002", "head")):
        own = weights_of(expected, part, "weights")
        converted = found[name](part)
        assert converted.keys() == own.keys()
        assert all(torch.equal(converted[key], tensor) for key, tensor in own.items()), (name, part)
