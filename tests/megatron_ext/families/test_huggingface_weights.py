"""A run begins with published weights, read by each rank for its own blocks, and gives back a folder that transformers
loads."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from conf.compose import compose
from launch import cli
from launch.commands.launching.preflight import with_length
from launch.control.planning.plan import make_plan
from megatron_ext.checkpoints.meta import Checkpoint, to_load
from megatron_ext.checkpoints.published import INDEX, WHOLE, tensors_of
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.contract.train_config import Train
from megatron_ext.data.samples import BEGINNING
from megatron_ext.families.huggingface import library
from megatron_ext.families.huggingface.anatomy import logits_of
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.families.huggingface.weights import Published
from megatron_ext.inference.generating import Generator
from megatron_ext.inference.held_out import whole_model
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import NAMED, plan_of
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.tiny_transformers import VOCAB, whole, working

TOKENS = torch.arange(32).reshape(2, 16) + 3
BESIDE = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 7}'}
LAYOUTS = {
    "one process": (),
    "two stages": ("parallel.pipeline=2", "parallel.partition=1-3"),
    "two replicas": ("parallel.data=2",),
    "tensor": ("parallel.tensor=2",),
    "tensor and stages": ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=3-1"),
}


def published(kind: str, folder: Path, tied: bool = False) -> Any:
    """The configuration of a tiny model, whose weights are saved in bf16 and in shards."""
    config = working(kind)
    config.tie_word_embeddings = tied
    whole(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    for name, text in BESIDE.items():
        (folder / name).write_text(text)
    return config


def theirs(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model(input_ids=tokens, use_cache=False))


def stage_with_weights(task: HuggingFaceTask, files: dict[str, Path]) -> Stage:
    stage = Stage(task, cut_between(task, [task.blocks])[0], TensorGroup())
    found = {block.name: task.published(files, block.name) for block in task.blocks}
    for name, parameter in stage.parameters_by_name():
        block, inner = stage.places[name]
        parameter.data.copy_(found[block][inner])
    for block, inner, tensor in stage.state:
        tensor.data.copy_(found[block][inner])
    return stage.eval()


@pytest.mark.parametrize("kind", NAMED)
def test_published_weights_give_the_logits_of_from_pretrained_and_go_back(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = published(kind, source)
    assert len(set(tensors_of(source).values())) > 1
    expected = logits(theirs(source), TOKENS)
    task = HuggingFaceTask(plan_of(config, tmp_path))
    stage = stage_with_weights(task, tensors_of(source))
    found = stage(dict.fromkeys(stage.inputs, TOKENS))["logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    def content(block: str) -> dict[str, torch.Tensor]:
        named = {stage.places[name]: one.detach() for name, one in stage.parameters_by_name()}
        named |= {(holder, inner): one for holder, inner, one in stage.state}
        return {inner: one for (holder, inner), one in named.items() if holder == block}

    task.publish(content, tmp_path / "back")
    torch.testing.assert_close(logits(theirs(tmp_path / "back"), TOKENS), expected, rtol=0, atol=1e-5)
    written = [load_file(path).keys() for path in set(tensors_of(tmp_path / "back").values())]
    before = [load_file(path).keys() for path in set(tensors_of(source).values())]
    assert {key for keys in written for key in keys} == {key for keys in before for key in keys}


def test_only_the_tensors_of_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = published("mixtral", tmp_path / "source")
    task = HuggingFaceTask(plan_of(config, tmp_path))
    read: list[str] = []
    usual = Published._read
    monkeypatch.setattr(Published, "_read", lambda self, key: read.append(key) or usual(self, key))
    task.published(tensors_of(tmp_path / "source"), "layers.2")
    assert {key.partition("layers.")[2].partition(".")[0] for key in read} == {"2"}
    assert len(read) > 4 * 3  # three matrices of each of four experts
    read.clear()
    task.published(tensors_of(tmp_path / "source"), "head")
    assert sorted(read) == ["lm_head.weight", "model.norm.weight"]


def test_a_tied_matrix_is_found_under_its_other_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = published("qwen2", source, tied=True)
    tensors = {name: one for path in set(tensors_of(source).values()) for name, one in load_file(path).items()}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / WHOLE)
    task = HuggingFaceTask(plan_of(config, tmp_path))
    found = task.published(tensors_of(other), "embedding")["model.embed_tokens.weight"]
    torch.testing.assert_close(found, tensors["lm_head.weight"].float())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("published") / "qwen"
    published("qwen3", found, tied=True)
    return found


def words(folder: Path) -> Iterator[str]:
    """The words of a run of the published model, whose sequences are those of the corpus."""
    yield from ("model=huggingface", f"model.config={folder}", f"train.load={folder}", "model.sequence_length=24")
    yield from ("train.iterations=2", "train.log_interval=1", "parallel.global_batch_size=8")
    yield from (
        "train.comm_timeout_s=120",
        "train.lr_warmup_iterations=1",
        "parallel=single",
        "parallel.micro_batch_size=2",
        "parallel.partition=null",
    )


def run_of(path: Path, corpus: Path, folder: Path, *others: str) -> EngineRun:
    run = make_run(path, corpus, *others, base=list(words(folder)))
    assert run.go() == 0, run.stderr()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_that_of_from_pretrained(layout: str, tmp_path: Path, corpus: Path, folder: Path) -> None:
    run = run_of(tmp_path / "run", corpus, folder, *LAYOUTS[layout])
    task = HuggingFaceTask(run.plan)
    samples = task.samples("train", 16)
    batch = torch.from_numpy(samples.batch(np.arange(8))["tokens"]).long()
    expected = F.cross_entropy(logits(theirs(folder), batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert abs(run.losses()[0] - expected.item()) < 1e-5


@pytest.mark.slow
def test_a_trained_run_goes_back_to_transformers_and_on_under_another_layout(
    tmp_path: Path, corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "runs" / "mine" / "20260101-120000-0123abcd", corpus, folder, *LAYOUTS["tensor and stages"])
    (run.run.path / "config.yaml").touch()
    out = tmp_path / "out"
    assert cli.main(["checkpoint", "convert", str(run.run.path), "--to", "huggingface", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"written: {out}: iter_0000002" in said
    assert f"files of {folder}" in said
    assert {name: (out / name).read_text() for name in BESIDE} == BESIDE
    model = whole_model(HuggingFaceTask(run.plan), Checkpoint.at(run.run.path), torch.device("cpu"))
    tokens = TOKENS.remainder(VOCAB)
    ours = model(dict.fromkeys(model.inputs, tokens))["logits"]
    torch.testing.assert_close(logits(theirs(out), tokens), ours, rtol=0, atol=1e-5)
    from transformers import GenerationConfig

    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    converted: Any = theirs(out)
    expected = converted.generate(TOKENS[:1, :3], generation_config=greedy)
    generator = Generator(run.plan, Checkpoint.at(run.run.path), WEIGHTS, "cpu")
    assert [*generator.tokens(TOKENS[0, :3].tolist(), 6, 0.0, 0, end=-1)] == expected[0, 3:].tolist()
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"

    others = (*LAYOUTS["two replicas"], "train.iterations=3", f"data.prefix={corpus}")
    moved = compose([*words(folder), *others, f"model.config={out}"]).model  # as convert wrote it
    assert to_load(run.run.path, moved.sized(1).identity(), run.plan.train, 3).meta.iteration == 2
    plan = make_plan(with_length(compose([*words(folder), *others])), run.plan.run)
    run.run.write_json(run.run.plan, plan.as_json())
    rest = EngineRun(run.run, Plan.read(run.run.plan))
    assert rest.go() == 0, rest.stderr()  # resumed from its own checkpoint, not from the folder
    assert [line["iteration"] for line in rest.metrics()] == [1, 2, 3]

    assert cli.main(["checkpoint", "convert", str(run.run.path), "--to", "huggingface", str(out)]) == 1
    assert f"{out}: is there already; give a new folder" in capsys.readouterr().err


IDENTITY = {"family": "huggingface", "layers": 4}


def sharded(places: dict[str, str]) -> str:
    return json.dumps({"weight_map": places})


def safetensors(length: int, header: str) -> bytes:
    return struct.pack("<Q", length) + header.encode()


ENTRY = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).ljust(72)
TENSOR = safetensors(72, ENTRY) + bytes(4)
"""Four bytes are missing."""


def test_a_folder_of_weights_is_the_beginning_of_a_run(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / WHOLE)
    found = to_load(tmp_path, IDENTITY, Train(), 10)
    assert (found.published, found.position, found.meta.updates) == (True, BEGINNING, 0)


@pytest.mark.parametrize(
    ("files", "identity", "told"),
    [
        ({WHOLE: b""}, {"family": "bert", "layers": 4}, "model.family=bert"),
        ({"pytorch_model.bin": b""}, IDENTITY, "found pytorch_model.bin; reading a .bin can run any code"),
        ({INDEX: sharded({"a": "b.safetensors"})}, IDENTITY, "1 of its 1 shards are not there"),
        (
            {INDEX: sharded({"a": "../b.safetensors"})},
            IDENTITY,
            "'../b.safetensors', which is not a file in its folder",
        ),
        ({INDEX: sharded({"a": "/etc/passwd"})}, IDENTITY, "'/etc/passwd', which is not a file in its folder"),
        ({INDEX: sharded({"a": "b"}), "b": safetensors(2, "{}")}, IDENTITY, "a should be in b, which does not have it"),
        ({INDEX: sharded({"a": "b"}), "b": TENSOR}, IDENTITY, "b: damaged: expected 88 bytes, found 84"),
        ({WHOLE: safetensors(2, "{}")}, IDENTITY, "has no tensors"),
        ({WHOLE: safetensors(1 << 62, "{}")}, IDENTITY, "expected a header of 4611686018427387904 bytes, found a file"),
        ({WHOLE: TENSOR.replace(b"BF16", b"F8_X")}, IDENTITY, "tensor a has the number format F8_X"),
    ],
    ids=[
        *("another family", "pickled", "a shard is missing", "above the folder", "outside", "not in its shard"),
        *("cut off", "empty", "giant header", "quantized"),
    ],
)
def test_weights_that_cannot_be_loaded_are_refused_before_a_run_starts(
    files: dict[str, str | bytes], identity: dict[str, object], told: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EngineError, match=re.escape(told)) as error:
        to_load(tmp_path, identity, Train(), 10)
    assert str(error.value).startswith(f"train.load={tmp_path}")


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    config = published("llama", tmp_path / "source")
    with torch.device("meta"):
        model: Any = library._made(library.transformers(), config)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(EngineError, match=r"its weights are quantized \(fp8\)"):
        Published(model, tensors_of(tmp_path / "source"))
