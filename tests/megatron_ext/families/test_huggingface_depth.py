"""Ten families in depth: stages, replicas with unequal shares and recomputation, then a resume under tensor groups (or
more stages), train as one process does; what is exported gives transformers the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoints.converting import publish
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.run_files import WEIGHTS
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.inference.held_out import whole_model
from tests.megatron_ext.families.test_huggingface import NAMED
from tests.megatron_ext.families.test_huggingface_experts import balancing
from tests.megatron_ext.families.test_huggingface_weights import TOKENS, logits, theirs
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run
from tests.support.megatron_ext.tiny_transformers import working

EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
ITERATIONS = 4
COMMON = (
    *(
        "model=huggingface",
        "model.sequence_length=24",
        "train.seed=1",
        "train.log_interval=1",
        "train.lr=1e-3",
        "train.min_lr=1e-3",
    ),
    *("train.lr_warmup_iterations=1", "train.comm_timeout_s=120", "train.clip_grad=0.5", "parallel=single"),
    *("parallel.global_batch_size=8", "parallel.micro_batch_size=2", "parallel.partition=null"),
)
UNEVEN = ("parallel.pipeline=2", "parallel.partition=1-3", "parallel.data=2", "parallel.shares=3-1")
TENSOR = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=3-1")
STAGES = ("parallel.pipeline=4", "parallel.partition=1-1-1-1")


def trained(folder: Path, corpus: Path, words: list[str], *layout: str) -> EngineRun:
    run = make_run(folder, corpus, *layout, base=words)
    assert run.go() == 0, run.stderr()
    return run


def loads(run: EngineRun) -> torch.Tensor:
    """[iterations, layers, experts]."""
    lines = [json.loads(line) for line in run.run.experts.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    return torch.tensor([line["loads"] for line in lines])


def check(kind: str, folder: Path, corpus: Path) -> None:
    config = balancing(kind) if kind in EXPERTS else working(kind)
    config.vocab_size = VOCAB
    file = folder / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "model_type": config.model_type}, default=str))
    words = [*COMMON, f"model.config={file}"]
    one = trained(folder / "one", corpus, [*words, f"train.iterations={ITERATIONS}"])
    many = trained(folder / "many", corpus, [*words, "train.iterations=2"], *UNEVEN, "parallel.recompute=full")
    layout = STAGES if kind == "gpt_oss" else TENSOR
    rest = many.replan(*layout, f"train.iterations={ITERATIONS}", base=words)
    assert rest.go() == 0, rest.stderr()
    assert rest.losses() == pytest.approx(one.losses(), abs=1e-5)
    for name, tensor in one.weights().items():
        torch.testing.assert_close(rest.weights()[name], tensor, rtol=0, atol=1e-5)
    if kind in EXPERTS:
        torch.testing.assert_close(loads(rest), loads(one), rtol=0, atol=1e-3)
        found, expected = ([line["load_balancing_loss"] for line in run.metrics()] for run in (rest, one))
        assert found == pytest.approx(expected, abs=1e-5)
    task, newest = HuggingFaceTask(rest.plan), Checkpoint.at(rest.run.path)
    publish(rest.plan, newest, folder / "out", WEIGHTS)
    tokens = TOKENS.remainder(VOCAB)
    model = whole_model(task, newest, torch.device("cpu"))
    ours = model(dict.fromkeys(model.inputs, tokens))["logits"]
    torch.testing.assert_close(logits(theirs(folder / "out"), tokens), ours, rtol=0, atol=1e-5)


def test_experts_train_and_are_balanced_as_in_one_process(tmp_path: Path, corpus: Path) -> None:
    check("mixtral", tmp_path, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in NAMED if kind != "mixtral"])
def test_a_family_trains_as_one_process_and_goes_back_to_transformers(kind: str, tmp_path: Path, corpus: Path) -> None:
    check(kind, tmp_path, corpus)
