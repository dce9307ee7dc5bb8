"""What transformers or tdpp cannot do with a model is said before anything starts, not by ranks."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conf import torch_answers
from conf.compose import compose
from conf.errors import TdppError
from launch.commands.launching.preflight import check_model
from megatron_ext import check
from megatron_ext.families.huggingface import blocks
from tests.support.megatron_ext.tiny_transformers import working


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that looks is this one, and its answers are not kept."""

    def run(module: str, words: object = (), given: str = "") -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setattr(sys, "stdin", io.StringIO(given))
            code = check.main()
        return subprocess.CompletedProcess([module], code, out.getvalue(), "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_answers, "run", run)
    torch_answers._answer.cache_clear()


def checked(folder: Path, config: Any, *words: str) -> list[str]:
    content = {**config.to_dict(), "model_type": config.model_type}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    common = ("model=huggingface", "model.sequence_length=16", "parallel=single", "parallel.partition=null")
    return check_model(compose([*common, f"model.config={folder}", *words]))


REFUSED = {
    "no tensor plan": (
        *("gpt_oss", ["parallel.tensor=2"]),
        r"^parallel\.tensor=2 is not possible with GptOssForCausalLM: transformers has no tensor plan for it "
        r"\(base_model_tp_plan\); use parallel\.tensor=1",
    ),
    "heads that it does not divide": (
        *("qwen3", ["parallel.tensor=4"]),
        r"^parallel\.tensor=4 is not possible with Qwen3ForCausalLM: num_key_value_heads=2 is not a multiple of 4",
    ),
    "one stage's group": (
        *("gpt_oss", ["parallel.pipeline=2", "parallel.partition=2-2", "parallel.tensor=1-2"]),
        r"^parallel\.tensor=2 is not possible with GptOssForCausalLM",
    ),
    "no such layer for adapters": (
        *("llama", ["train.load=.", "train.lora_rank=2", "train.lora_targets=[nothing]"]),
        r"^train\.lora_targets=\[nothing\]: .* no linear layer nothing; they have down_proj, gate_proj",
    ),
    "documents that see each other": (
        *("qwen3_next", ["data.packing=true"]),
        r"^data\.packing=true: in a layer of Qwen3NextForCausalLM documents that share a sample would see each other",
    ),
    "nothing to predict": ("eurobert", [], "^transformers has no causal model of a eurobert: each token"),
}


@pytest.mark.parametrize(("kind", "words", "told"), REFUSED.values(), ids=REFUSED)
def test_what_a_model_cannot_do_is_refused(kind: str, words: list[str], told: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind]() if kind == "eurobert" else working(kind)
    with pytest.raises(TdppError, match=told):
        checked(tmp_path, config, *words)


def test_what_it_can_do_is_not(tmp_path: Path) -> None:
    words = ("parallel.tensor=2", "train.load=.", "train.lora_rank=2", "data.packing=true")
    assert checked(tmp_path, working("qwen3_moe"), *words) == []


def test_layers_that_are_too_large_to_try_are_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MOST_TRIED", 100)
    (doubt,) = checked(tmp_path, working("qwen3_next"), "data.packing=true")
    assert doubt == f"data.packing=true: whether model.config={tmp_path} keeps documents apart is tried on the nodes"


def test_a_layer_with_many_experts_is_tried_with_the_memory_of_one(tmp_path: Path) -> None:
    config = working("qwen3_next")
    experts = 4 * blocks.MOST_TRIED // (3 * config.hidden_size * config.moe_intermediate_size)
    large = CONFIG_MAPPING["qwen3_next"](**{**config.to_dict(), "num_experts": experts})
    with pytest.raises(TdppError, match=r"documents that share a sample would see each other"):
        checked(tmp_path, large, "data.packing=true")


@pytest.mark.parametrize("why", ["container", "no transformers"])
def test_what_only_the_nodes_can_tell_is_a_doubt(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["container=enroot", "container.image=a.sqsh"] if why == "container" else []
    if not words:
        monkeypatch.setattr("launch.commands.launching.preflight.has_transformers", lambda: False)
    doubts = checked(tmp_path, working("gpt_oss"), "parallel.tensor=2", *words)
    assert doubts == [f"model.config={tmp_path} is checked when the run starts, on its nodes"]
