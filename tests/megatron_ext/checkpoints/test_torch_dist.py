"""Megatron-Core's format is read without running what its pickles name, and what does not fit is one message."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import compose
from conf.errors import TdppError
from launch import cli
from launch.commands.launching.preflight import preflight
from megatron_ext.checkpoints.converting import weights_of
from megatron_ext.checkpoints.foreign import megatron_names, torch_dist
from megatron_ext.checkpoints.foreign.weights import weights_at
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.model import ModelConfig
from tests.support.megatron_ext.core_layouts import arguments_of
from tests.support.megatron_ext.engine_run import TINY, EngineRun, make_run


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
    torch.distributed.checkpoint.load(theirs, checkpoint_id=saved / "release", no_dist=True)  # type: ignore[attr-defined]
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


NO_BIASES = "model.add_bias_linear=false"
UNTIED = "model.untie_embeddings_and_output_weights=true"


def save_zeros(folder: Path, model: ModelConfig) -> None:
    folder.mkdir()
    zeros = {(part, name): torch.zeros(one.shape) for part, name, one in megatron_names._parameters(model)}
    megatron_names.save(folder, model, lambda part, _: {name: one for (of, name), one in zeros.items() if of == part})


def launched(corpus: Path, *words: str) -> list[str]:
    """What a launch says before anything is started."""
    return [*preflight(compose([*TINY, f"data.prefix={corpus}", *words]))]


@pytest.mark.parametrize(
    ("theirs", "ours", "tensor", "key"),
    [
        ("", NO_BIASES, "decoder.layers.mlp.linear_fc1.bias", "use model.add_bias_linear=true"),
        (UNTIED, "", "its model has output_layer.weight,", f"use {UNTIED}"),
        ("", "model.normalization=RMSNorm", "decoder.final_layernorm.bias", "use model.normalization=LayerNorm"),
        (
            f"{NO_BIASES} model.add_qkv_bias=true",
            NO_BIASES,
            "its model has decoder.layers.self_attention.linear_qkv.bias,",
            "use model.add_qkv_bias=true",
        ),
        (
            "model.qk_layernorm=true model.normalization=RMSNorm",
            "model.normalization=RMSNorm",
            "k_layernorm.weight",
            "",
        ),
        (
            "",
            "model.position_embedding_type=rope",
            "embedding.position_embeddings.weight",
            "use model.position_embedding_type=learned_absolute",
        ),
        (
            UNTIED,
            NO_BIASES,
            " and 2 more,",
            f"use model.add_bias_linear=true {UNTIED}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tensor_that_the_model_lacks_is_refused(
    tmp_path: Path, corpus: Path, theirs: str, ours: str, tensor: str, key: str
) -> None:
    folder = tmp_path / "saved"
    save_zeros(folder, make_run(tmp_path / "run", corpus, *theirs.split()).plan.model)
    launched(corpus, *theirs.split(), f"train.load={folder}")
    with pytest.raises(TdppError, match=f"^train.load={folder}: ") as raised:
        launched(corpus, *ours.split(), f"train.load={folder}")
    assert tensor in str(raised.value)
    assert key in str(raised.value)


def test_a_tensor_that_no_model_has_is_refused(run: EngineRun, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch_dist.read_index(saved)
    index["decoder.layers.mlp.router.expert_bias"] = index["decoder.layers.mlp.linear_fc1.bias"]
    monkeypatch.setattr(torch_dist, "read_index", lambda _: index)
    with pytest.raises(EngineError, match=r"has decoder.layers.mlp.router.expert_bias, .* of which tdpp has none"):
        megatron_names.Weights(saved, model_of(run))


def test_a_model_that_the_format_cannot_hold_is_refused(saved: Path, corpus: Path) -> None:
    with pytest.raises(TdppError, match=r"a model with attention_post_norm.weight is none of Megatron-Core's"):
        launched(corpus, "model.post_norms=true", f"train.load={saved}")


def test_a_launch_says_that_weights_alone_are_taken(saved: Path, corpus: Path) -> None:
    (said,) = [one for one in launched(corpus, f"train.load={saved}") if one.startswith("train.load=")]
    assert "only the weights are loaded" in said
    assert f"tdpp checkpoint convert {saved} FOLDER --to tdpp" in said


OPTIMIZER = {"param_groups": [{"lr": 0.1}], "state": {"common_step": torch.tensor(2.0)}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing is wrong": ({}, "expected a tensor optimizer.state."),  # which the folder has not
    "no arguments": ({"args": None}, "has no arguments of Megatron-LM"),
    "arguments are a number": ({"args": 3}, "has no arguments of Megatron-LM"),
    "an argument is missing": ({"num_layers": None}, "'num_layers' is missing"),
    "too many layers": ({"num_layers": 10**9}, "model.layers=1000000000 must be at most 10000"),
    "another model": ({"untie_embeddings_and_output_weights": True}, "expected a tensor output_layer.weight"),
    "a smaller model": ({"add_bias_linear": False, "optimizer": None}, "use model.add_bias_linear=true"),
    "no iteration": ({"iteration": None}, "'iteration' is missing"),
    "iteration is infinite": ({"iteration": float("inf")}, "cannot convert float infinity"),
    "no updates": ({"optimizer": {**OPTIMIZER, "state": {}}}, "counts the optimizer's updates"),
    "infinite scale": (
        {
            "optimizer": {
                **OPTIMIZER,
                "grad_scaler": {"scale": float("inf"), "growth_tracker": 0, "hysteresis_tracker": 2},
            }
        },
        "expected a loss scale above 0, found inf",
    ),
    "by a layout": (
        {"optimizer": {**OPTIMIZER, "param_state_sharding_type": "fully_sharded_model_space"}},
        "has the form fully_sharded_model_space, which follows from the layout",
    ),
    "one of several by a layout": (
        {"optimizer": {0: OPTIMIZER, 1: {**OPTIMIZER, "param_state_sharding_type": "fully_sharded_model_space"}}},
        "fully_sharded_model_space",
    ),
}
"""What is different in what all ranks share, and what is said of it."""


def refused(saved: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["checkpoint", "convert", str(saved), str(out), "--to", "tdpp"]) == 1
    assert not list(out.parent.glob(f"*{out.name}*"))
    said = capsys.readouterr().err
    assert said.startswith("tdpp: error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("case", REFUSED)
def test_what_all_ranks_share_is_checked(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, message = REFUSED[case]
    args, common = arguments_of(), {"iteration": 2, "optimizer": OPTIMIZER}
    args.consumed_train_samples = 16
    common["args"] = args
    for name, value in change.items():
        of = common if name in common else vars(args)
        of[name] = value
        if value is None and name != "args":
            del of[name]
    torch.save(common, saved / "release" / torch_dist.COMMON)
    assert message in refused(saved, tmp_path / "ours", capsys)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PK")], ids=["missing", "damaged"])
def test_the_way_out_without_what_all_ranks_share(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    damage(saved / "release" / torch_dist.COMMON)
    assert f"train.load={saved} takes the weights alone" in refused(saved, tmp_path / "ours", capsys)


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
