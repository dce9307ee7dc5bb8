"""What is exported is Hugging Face's GPT-2: its names, its shapes, its function; and it comes back as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megatron_ext import hf
from megatron_ext.checkpoints import safetensors
from megatron_ext.checkpoints.header import part_names
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.stage import Stage
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run

LAYERS, HIDDEN, HEADS, SEQUENCE = 3, 32, 4, 24
ONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    run = make_run(
        tmp_path_factory.mktemp("hf") / "run", corpus, "parallel.data=1", "parallel.tensor=2", "parallel.pipeline=2"
    )
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture(scope="module")
def exported(trained: EngineRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    assert hf.main(["export", str(trained.run.path), str(out)]) == 0
    return out


def gpt2(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2 from the paper's description and the layout's names, with no code of the engine's: logits of tokens [n]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def conv1d(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    n = len(tokens)
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][:n]
    future = torch.ones(n, n).triu(1).bool()
    for layer in range(LAYERS):
        name = f"transformer.h.{layer}"
        qkv = conv1d(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        query, key, value = (part.view(n, HEADS, -1).transpose(0, 1) for part in qkv.split(HIDDEN, -1))
        scores = query @ key.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + conv1d(attended.transpose(0, 1).reshape(n, HIDDEN), f"{name}.attn.c_proj")
        inner = conv1d(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        inner = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        x = x + conv1d(inner, f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


def with_weights_of(run: EngineRun) -> Stage:
    """The engine's whole model with the weights of the run's newest checkpoint, read without the engine's loader."""
    weights = run.weights()
    plan = run.replan(*ONE).plan
    stage = stage_of(plan, 0, TensorGroup())
    for name, parameter in stage.parameters_by_name():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"layer-{int(number):05d}.{rest}"
        parameter.data = weights[name]
    return stage


def test_names_and_shapes_are_those_of_gpt2(exported: Path) -> None:
    expected = {
        "wte.weight": [VOCAB, HIDDEN],
        "wpe.weight": [SEQUENCE, HIDDEN],
        "ln_f.weight": [HIDDEN],
        "ln_f.bias": [HIDDEN],
    }
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            expected |= {f"h.{layer}.{norm}.{kind}": [HIDDEN] for kind in ("weight", "bias")}
        for name, ins, outs in (
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ):
            expected[f"h.{layer}.{name}.weight"] = [ins * HIDDEN, outs * HIDDEN]
            expected[f"h.{layer}.{name}.bias"] = [outs * HIDDEN]
    tensors = safetensors.read(exported / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == {f"transformer.{k}": v for k, v in expected.items()}
    config = json.loads((exported / "config.json").read_text())
    sizes = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "activation_function")
    assert [config[key] for key in sizes] == [LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB, "gelu_new"]


def test_the_file_is_laid_out_as_the_format_says(exported: Path) -> None:
    raw = (exported / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert start % 8 == 0
    assert header.pop("__metadata__")["format"] == "pt"
    entry = header["transformer.ln_f.bias"]
    begin, end = entry["data_offsets"]
    found = torch.frombuffer(bytearray(raw[start + begin : start + end]), dtype=torch.float32)
    assert entry["dtype"] == "F32"
    assert torch.equal(found, safetensors.read(exported / "model.safetensors")["transformer.ln_f.bias"])
    assert sorted(e["data_offsets"][1] for e in header.values())[-1] == len(raw) - start


def test_the_exported_weights_compute_what_the_engine_computes(trained: EngineRun, exported: Path) -> None:
    """In fp64: rounding errors of fp32 are larger than what the kinds of GELU differ by."""
    tokens = torch.arange(SEQUENCE) * 7 % VOCAB
    theirs = safetensors.read(exported / "model.safetensors")
    stage = with_weights_of(trained).double()
    with torch.no_grad():
        ours = stage({"tokens": tokens[None]})["logits"][0, :, :VOCAB]
    logits = gpt2({name: tensor.double() for name, tensor in theirs.items()}, tokens)
    torch.testing.assert_close(ours, logits, rtol=1e-9, atol=1e-9)
    assert F.cross_entropy(ours[:-1], tokens[1:]) > 0


@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["with-head", "as-published"])
def test_imported_again_every_weight_is_what_it_was(
    trained: EngineRun, exported: Path, tmp_path: Path, prefix: str
) -> None:
    theirs = safetensors.read(exported / "model.safetensors")
    theirs = {prefix + name[len("transformer.") :]: tensor for name, tensor in theirs.items()}
    safetensors.write(tmp_path / "model.safetensors", theirs, {})
    assert hf.main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "made"), "--heads", str(HEADS)]) == 0
    made = Checkpoint.read(tmp_path / "made")
    newest = Checkpoint.at(trained.run.path)
    assert made.meta.model == newest.meta.model
    for part in part_names(LAYERS):
        content = safetensors.read(made.part(part))
        before = {n: t for n, t in safetensors.read(newest.part(part)).items() if n.startswith("weights/")}
        assert content.keys() == before.keys()
        assert all(torch.equal(content[name], before[name]) for name in before)


def test_a_run_trains_from_imported_weights(trained: EngineRun, exported: Path, tmp_path: Path, corpus: Path) -> None:
    assert hf.main(["import", str(exported), str(tmp_path / "made")]) == 0
    run = make_run(tmp_path / "run", corpus, f"train.load={tmp_path / 'made'}", "train.lr=1e-9", "train.min_lr=0")
    assert run.go() == 0, run.stderr()
    assert run.metrics()[0]["iteration"] == 1
    for name, tensor in trained.weights().items():
        torch.testing.assert_close(run.weights()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "expected activation_function='gelu_new', found 'relu'"),
        (
            {"model_type": "bert"},
            "expected model_type='gemma2' or 'gemma3_text' or 'gpt2' or 'llama' or 'mistral' or 'mixtral' or 'qwen2' "
            "or 'qwen3' or 'stablelm', found 'bert'",
        ),
        ({"n_inner": 100}, "n_inner=100, but the engine's models have 4 x n_embd"),
        ({"n_head": 5}, "5 attention heads do not divide the hidden size 32"),
        ({"n_head": "4"}, "'4' attention heads do not divide the hidden size 32"),
        ({"n_layer": 12}, "its tensors have n_layer=3, but config.json has n_layer=12"),
        ({"n_positions": 1024}, "its tensors have n_positions=24, but config.json has n_positions=1024"),
    ],
    ids=["activation", "family", "inner-width", "heads", "heads-in-quotes", "layers", "positions"],
)
def test_a_model_that_the_engine_would_compute_otherwise_is_refused(
    exported: Path, tmp_path: Path, change: dict, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((exported / "model.safetensors").read_bytes())
    config = json.loads((exported / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert hf.main(["import", str(folder), str(tmp_path / "made")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("transformer.h.1.mlp.c_fc.bias"), "expected a tensor h.1.mlp.c_fc.bias"),
        (lambda t: t.pop("transformer.h.2.ln_1.weight"), "expected a tensor h.2.ln_1.weight"),
        (
            lambda t: t.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(4 * HIDDEN, HIDDEN)}),
            r"expected h.1.mlp.c_fc.weight of shape \[32, 128\], found \[128, 32\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, HIDDEN)}), "its lm_head.weight is not its embedding"),
    ],
    ids=["missing", "missing-in-the-last-layer", "transposed", "untied"],
)
def test_weights_that_do_not_fit_are_named(exported: Path, tmp_path: Path, spoil, message: str) -> None:
    tensors = safetensors.read(exported / "model.safetensors")
    spoil(tensors)
    safetensors.write(tmp_path / "model.safetensors", tensors, {})
    with pytest.raises(EngineError, match=message):
        hf.import_(tmp_path / "model.safetensors", tmp_path / "new" / "made", HEADS)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_a_file_of_ours_that_is_damaged_is_not_imported(exported: Path, tmp_path: Path) -> None:
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors: damaged: expected the CRC-32 "):
        hf.import_(tmp_path / "model.safetensors", tmp_path / "made", HEADS)
    assert not (tmp_path / "made").exists()


def test_an_import_overwrites_no_checkpoint(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is there already; give a new folder"):
        hf.import_(exported, tmp_path, None)


def test_a_config_that_is_no_object_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "theirs")
    (folder / "config.json").write_text("[]")
    with pytest.raises(EngineError, match=r"config.json: expected a JSON object, found list"):
        hf.import_(folder, tmp_path / "made", None)


def test_the_command_tells_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_ext.hf", "export", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}: no checkpoint found; give a run folder")
    assert done.stdout == ""


def shards(exported: Path, folder: Path, count: int = 3) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """Writes the model as transformers saves a large one; the tensors of each shard, and the index's weight_map."""
    tensors = safetensors.read(exported / "model.safetensors")
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        files.setdefault(f"model-{number % count + 1:05d}-of-{count:05d}.safetensors", {})[name] = tensor
    places = {name: file for file, own in files.items() for name in own}
    folder.mkdir()
    (folder / "config.json").write_text((exported / "config.json").read_text())
    for file, own in files.items():
        safetensors.write(folder / file, own, {"format": "pt"})
    index(folder, places)
    return files, places


def index(folder: Path, places: object) -> None:
    content = {"metadata": {"total_size": 7}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("source", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_shards_are_imported_as_one_file_is(exported: Path, tmp_path: Path, source: str) -> None:
    shards(exported, tmp_path / "sharded")
    assert hf.main(["import", str(tmp_path / "sharded" / source), str(tmp_path / "made")]) == 0
    assert hf.main(["import", str(exported), str(tmp_path / "whole")]) == 0
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "made" / path.name).read_bytes() == path.read_bytes()


def test_shards_may_be_links_as_in_hugging_faces_cache(exported: Path, tmp_path: Path) -> None:
    files, _ = shards(exported, tmp_path / "sharded")
    (tmp_path / "blobs").mkdir()
    for file in files:
        (tmp_path / "sharded" / file).rename(tmp_path / "blobs" / file)
        (tmp_path / "sharded" / file).symlink_to(Path("..") / "blobs" / file)
    assert hf.main(["import", str(tmp_path / "sharded"), str(tmp_path / "made")]) == 0


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the import says, which leaves nothing."""
    made = folder.parent / "made"
    assert hf.main(["import", str(folder), str(made)]) == 1
    assert not made.exists()
    told = capsys.readouterr().err
    assert told.startswith(f"error: {folder}")
    assert told.count("\n") == 1
    return told


def test_missing_shards_are_named_together(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, _ = shards(exported, tmp_path / "sharded")
    first, second, _ = files
    for file in (first, second):
        (tmp_path / "sharded" / file).unlink()
    assert f"2 of its 3 shards are not there: {first}, {second}" in refused(tmp_path / "sharded", capsys)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b", 7, None, []]
)
def test_a_shards_name_stays_in_the_folder(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: object
) -> None:
    _, places = shards(exported, tmp_path / "sharded")
    tensor = next(iter(places))
    index(tmp_path / "sharded", {**places, tensor: name})
    told = refused(tmp_path / "sharded", capsys)
    assert f"the shard of tensor {tensor} is {name!r}, which is not a file in its folder" in told


def test_a_tensor_is_in_one_shard(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sharded"
    files, places = shards(exported, folder)
    first, second, _ = files
    name = next(iter(files[first]))
    safetensors.write(folder / second, {**files[second], name: files[first][name]}, {})
    assert f"the tensor {name} is in two shards, {first} and {second}" in refused(folder, capsys)
    safetensors.write(folder / first, {n: t for n, t in files[first].items() if n != name}, {})
    assert f"the tensor {name} is in {second}, but the index says that it is in {first}" in refused(folder, capsys)
    index(folder, {tensor: file for tensor, file in places.items() if tensor != name})
    assert f"the tensor {name} is in {second}, but the index does not list it" in refused(folder, capsys)
    safetensors.write(folder / second, files[second], {})
    index(folder, places)
    assert f"the tensor {name} should be in {first}, which does not have it" in refused(folder, capsys)


def test_an_index_that_names_a_tensor_twice_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(exported, tmp_path / "sharded")
    path = tmp_path / "sharded" / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"wte.weight": "a.safetensors", "wte.weight": "b.safetensors"}}')
    told = "wte.weight is there twice: 'a.safetensors' and 'b.safetensors'"
    assert told in refused(tmp_path / "sharded", capsys)


@pytest.mark.parametrize("content", ["", "[]", "7", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    shards(exported, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in refused(tmp_path / "sharded", capsys)


def test_a_folder_without_weights_says_what_it_has(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "config.json").write_text((exported / "config.json").read_text())
    (folder / "pytorch_model.bin").touch()
    wanted = "expected model.safetensors or model.safetensors.index.json, found config.json, pytorch_model.bin"
    assert wanted in refused(folder, capsys)


def test_a_tensor_under_both_of_its_names_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "twice"
    folder.mkdir()
    (folder / "config.json").write_text((exported / "config.json").read_text())
    tensors = safetensors.read(exported / "model.safetensors")
    tensors["ln_f.bias"] = tensors["transformer.ln_f.bias"] + 1
    safetensors.write(folder / "model.safetensors", tensors, {})
    assert "the tensor ln_f.bias is there twice" in refused(folder, capsys)
