"""Adapters are trained as the formula W + alpha / rank * BA says, nothing else changes, and they go to transformers and
to peft."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from conf.compose import compose
from conf.errors import ConfigError
from launch import cli
from launch.commands.launching.preflight import with_length
from launch.control.planning.plan import make_plan
from megatron_ext.checkpoints.meta import Checkpoint, to_load
from megatron_ext.checkpoints.published import tensors_of
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.train_config import Train
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.inference.held_out import whole_model
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import NAMED, plan_of
from tests.megatron_ext.families.test_huggingface_shares import config_of, losses_of, on_ranks
from tests.megatron_ext.families.test_huggingface_weights import logits, theirs
from tests.megatron_ext.families.test_packing import assert_same, chats, folder, losses_alone, words
from tests.support.chat_model import save_model
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.tiny_transformers import working

__all__ = ["chats", "folder"]

RANK, ALPHA = 4, 12.0
LORA = (f"train.lora_rank={RANK}", f"train.lora_alpha={ALPHA}", "data.packing=true")
LAYOUTS = {
    "one process": (),
    "two stages": ("parallel.pipeline=2", "parallel.partition=1-2"),
    "a stage with nothing to train": ("parallel.pipeline=2", "parallel.partition=0-3", "parallel.recompute=full"),
    "two replicas": ("parallel.data=2",),
    "shards and stages": (
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=2-1", "parallel.sharded_optimizer=true"),
    ),
    "tensor groups and stages": ("parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=2-1"),
    "gathered weights": ("parallel.data=2", "parallel.zero=3"),
    "gathered weights of one stage": (
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=2-1", "parallel.zero=0-3"),
    ),
    "gathered weights, nothing to train": (
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=0-3", "parallel.zero=3"),
    ),
    "gathered weights of tensor groups": ("parallel.tensor=2", "parallel.data=2", "parallel.zero=3"),
    "shards of tensor groups": ("parallel.tensor=2", "parallel.data=2", "parallel.sharded_optimizer=true"),
}
TOKENS = torch.arange(32).reshape(2, 16)


class Sum(nn.Module):
    """The matrix with its adapter added."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ALPHA / RANK * self.second @ self.first


def adapted(model: nn.Module, run: EngineRun, source: Path) -> nn.Module:
    """transformers' own model, whose matrices are sums; their first adapters are the run's."""
    task = HuggingFaceTask(run.plan)
    model.requires_grad_(False)
    for number in range(run.plan.model.layers):
        found = task.published(tensors_of(source), f"layers.{number}")
        layer: Any = model.get_submodule(f"model.layers.{number}")
        for name in [name[: -len(".lora_A")] for name in found if name.endswith(".lora_A")]:
            sums = Sum(found[f"{name}.lora_A"], found[f"{name}.lora_B"])
            parametrize.register_parametrization(layer.get_submodule(name), "weight", sums)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_trained_as_their_formula_says(layout: str, chats: Path, folder: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", chats, *LORA, *LAYOUTS[layout], base=words(folder))
    model: Any = adapted(theirs(folder), run, folder)
    assert_same(run, losses_alone(run.plan, model, lambda tokens: model(input_ids=tokens, use_cache=False).logits))
    state = run.state()
    before = {name: one.float() for path in set(tensors_of(folder).values()) for name, one in load_file(path).items()}
    moments = {name.partition("/")[2] for name in state if name.startswith("adam_m/")}
    trained = {name.partition("/")[2] for name in state if name.startswith("weights/")}
    assert moments == trained
    assert all(name.endswith((".lora_A", ".lora_B")) for name in trained)
    assert len(trained) == 3 * 7 * 2
    frozen = state["state/layer-00001.self_attn.q_proj.weight"]
    torch.testing.assert_close(frozen, before["model.layers.1.self_attn.q_proj.weight"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_go_to_transformers_and_peft_and_on_under_another_layout(
    tied: bool, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    save_model(source, tied=tied)
    path = tmp_path / "runs" / "mine" / "20260101-120000-0123abcd"
    targets = ("train.lora_targets=[q_proj,mlp.down_proj]", *LAYOUTS["two stages"])
    run = make_run(path, chats, *LORA, *targets, base=words(source))
    assert run.go() == 0, run.stderr()
    (path / "config.yaml").touch()
    model = whole_model(HuggingFaceTask(run.plan), Checkpoint.at(path), torch.device("cpu"))
    expected = model({name: TOKENS if name == "tokens" else torch.arange(16).expand(2, -1) for name in model.inputs})

    assert cli.main(["checkpoint", "convert", str(path), "--to", "huggingface", str(tmp_path / "merged")]) == 0
    assert "for from_pretrained of transformers" in capsys.readouterr().out
    merged = logits(theirs(tmp_path / "merged"), TOKENS)
    torch.testing.assert_close(merged, expected["logits"], rtol=0, atol=1e-5)
    base = theirs(source)
    assert (merged - logits(base, TOKENS)).abs().max() > 1e-3

    out = tmp_path / "adapter"
    assert cli.main(["checkpoint", "convert", str(path), "--to", "huggingface", str(out), "--adapter"]) == 0
    assert "for peft, as an adapter" in capsys.readouterr().out
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert config["target_modules"] == ["mlp.down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(source)
    own = load_file(out / "adapter_model.safetensors")
    assert len(own) == 3 * 2 * 2
    for name in {name.rpartition(".lora_")[0] for name in own}:
        module: Any = base.get_submodule(name.removeprefix("base_model.model."))
        module.weight.data += ALPHA / RANK * own[f"{name}.lora_B.weight"] @ own[f"{name}.lora_A.weight"]
    torch.testing.assert_close(logits(base, TOKENS), merged, rtol=0, atol=1e-5)

    others = (*LORA, targets[0], *LAYOUTS["two replicas"], "train.iterations=4", f"data.prefix={chats}")
    plan = make_plan(with_length(compose([*words(source), *others])), run.plan.run)
    run.run.write_json(run.run.plan, plan.as_json())
    rest = EngineRun(run.run, Plan.read(run.run.plan))
    assert rest.go() == 0, rest.stderr()
    assert [line["iteration"] for line in rest.metrics()] == [1, 2, 3, 4]

    has = f"found train.lora_rank={RANK} train.lora_alpha={float(ALPHA)} train.lora_targets=[mlp.down_proj,q_proj]"
    for given, expected_words in (
        ({"lora_rank": RANK + 1}, f"expected train.lora_rank={RANK + 1} "),
        ({"lora_alpha": 1.0}, f"expected train.lora_rank={RANK} train.lora_alpha=1.0 "),
        ({"lora_targets": ["q_proj"]}, "train.lora_targets=[q_proj]; found"),
        ({"lora_rank": None}, "expected none; found"),
    ):
        with pytest.raises(EngineError, match=re.escape(expected_words)) as error:
            to_load(path, rest.plan.model.identity(), replace(rest.plan.train, **given), None)
        assert has in str(error.value)
        assert "or train.load the folder that tdpp checkpoint convert" in str(error.value)


@pytest.mark.slow
def test_adapters_begin_from_published_weights_and_not_from_a_training_of_all(
    chats: Path, folder: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", chats, base=words(folder))
    assert run.go() == 0, run.stderr()
    told = "a checkpoint of other adapters: expected train.lora_rank=2 train.lora_alpha=4.0 train.lora_targets=null; "
    with pytest.raises(EngineError, match=re.escape(f"{told}found none; leave train.lora_rank out, or train.load")):
        to_load(run.run.path, run.plan.model.identity(), replace(run.plan.train, lora_rank=2), None)


SAVED = {
    "a dense model": (
        *("llama", "q_proj,mlp.down_proj", {"target_modules": ["mlp.down_proj", "q_proj"]}),
        {"self_attn.q_proj": (range(4), 32, 32), "mlp.down_proj": (range(4), 64, 32)},
    ),
    "experts in one tensor": (
        *("deepseek_v3", "o_proj,shared_experts.up_proj"),
        {"target_modules": ["o_proj"], "target_parameters": ["shared_experts.up_proj.weight"]},
        {"self_attn.o_proj": (range(4), 32, 32), "mlp.shared_experts.up_proj": ([3], 32, 32)},
    ),
}
"""A family, targets, and what peft 0.21.2 saves of the tiny model with `get_peft_model` and `save_pretrained`: layers,
and the numbers that a matrix takes and gives."""
USUAL = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none"},
    **{"fan_in_fan_out": False, "inference_mode": True},
}
"""What it writes of all of them."""


@pytest.mark.parametrize("saved", SAVED)
def test_an_adapters_files_are_those_that_peft_saves(saved: str, tmp_path: Path) -> None:
    kind, targets, named, matrices = SAVED[saved]
    words = ("train.lora_rank=2", "train.load=x", f"train.lora_targets=[{targets}]")
    plan = plan_of(working(kind), tmp_path, *words)
    task = HuggingFaceTask(plan)
    stage = Stage(task, cut_between(task, [task.blocks])[0], TensorGroup())
    content: dict[str, dict[str, torch.Tensor]] = {block.name: {} for block in task.blocks}
    for name, parameter in stage.parameters_by_name():
        block, inner = stage.places[name]
        content[block][inner] = parameter.detach()
    task.publish(lambda block: content[block], tmp_path, adapters=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config.pop("base_model_name_or_path") == plan.train.load
    assert config == {**USUAL, **named}
    found = {name: tuple(one.shape) for name, one in load_file(tmp_path / "adapter_model.safetensors").items()}
    expected = {}
    for inner, (layers, taken, given) in matrices.items():  # type: ignore[attr-defined]
        for layer in layers:
            name = f"base_model.model.model.layers.{layer}.{inner}"
            expected |= {f"{name}.lora_A.weight": (2, taken), f"{name}.lora_B.weight": (given, 2)}
    assert found == expected


@pytest.mark.slow
def test_peft_loads_an_adapter(chats: Path, folder: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    path = tmp_path / "runs" / "mine" / "20260101-120000-0123abcd"
    run = make_run(path, chats, *LORA, base=words(folder))
    assert run.go() == 0, run.stderr()
    (path / "config.yaml").touch()
    for out, more in (("merged", []), ("adapter", ["--adapter"])):
        cli.main(["checkpoint", "convert", str(path), "--to", "huggingface", str(tmp_path / out), *more])
    found = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "adapter").eval()
    expected = logits(theirs(tmp_path / "merged"), TOKENS)
    torch.testing.assert_close(logits(found, TOKENS), expected, rtol=0, atol=1e-5)


def trained_adapters(config: Any, folder: Path, tensor: TensorGroup) -> list[float]:
    """The losses of a rank whose adapters are random numbers at first."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("parallel.pipeline=1", f"parallel.tensor={tensor.size}", "train.lora_rank=2", "train.load=x")
    task = HuggingFaceTask(plan_of(config, folder, *words))
    stage = Stage(task, cut_between(task, [task.blocks])[0], tensor)
    source = torch.Generator().manual_seed(5)
    for name, parameter in stage.parameters_by_name():
        shard = task.shard(".".join(stage.places[name]))
        shape = [size * (tensor.size if shard and at == shard.dim else 1) for at, size in enumerate(parameter.shape)]
        drawn = torch.randn(shape, generator=source) / 4
        parameter.data = drawn if shard is None else shard.part(drawn, tensor.size, tensor.rank)
    return losses_of(task, stage, tensor)


@pytest.mark.parametrize(
    "kind",
    ["llama biases", "phi3", "deepseek_v3", "qwen2_moe"],
    ids=["biases of rows", "several matrices in one", "latent attention", "an expert for all tokens"],
)
def test_a_tensor_group_trains_adapters_as_one_process(kind: str, tmp_path: Path) -> None:
    (found,) = on_ranks([kind], tmp_path, trained_adapters).values()
    expected = trained_adapters(config_of(kind), tmp_path / "alone", TensorGroup())
    assert expected[0] - expected[-1] > 1e-3
    for losses in found:
        assert losses == pytest.approx(expected, abs=1e-5), losses


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_frozen_has_the_models_number_format(kind: str, tmp_path: Path) -> None:
    """Also an embedding whose module keeps the format of its buffers, as Gemma's."""
    words = ("parallel.pipeline=1", "parallel.partition=null", "train.lora_rank=2", "train.load=x")
    task = HuggingFaceTask(plan_of(working(kind), tmp_path, *words))
    stage = Stage(task, cut_between(task, [task.blocks])[0], TensorGroup())
    stage.place(torch.device("cpu"), torch.bfloat16)
    assert all("lora_" in name for name, _ in stage.parameters_by_name())
    assert {one.dtype for one in stage.parameters() if not one.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["train.lora_rank=4"], r"train\.lora_rank=4 trains adapters .*set train\.load"),
        (["train.lora_alpha=4"], r"train\.lora_alpha=4\.0 needs adapters; set train\.lora_rank"),
        (["train.lora_rank=4", "train.load=x", "train.lora_targets=[]"], r"lora_targets=\[\] must name matrices"),
        (["train.lora_rank=4", "train.load=x", "model=tiny"], r"which model\.family=gpt cannot have"),
    ],
    ids=["of no model", "alpha alone", "no targets", "another family"],
)
def test_adapters_that_cannot_be_are_refused(given: list[str], told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        plain = [one for one in words(folder) if not one.startswith(("train.load", "model=", "model."))]
        own = [] if "model=tiny" in given else words(folder)[:2]
        compose([*plain, *own, *given])


def test_a_folder_of_a_model_without_weights_is_refused_with_what_it_has(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    told = f"train.load={tmp_path}: expected model.safetensors or model.safetensors.index.json, found config.json"
    with pytest.raises(EngineError, match=re.escape(told)):
        to_load(tmp_path, {"family": "huggingface"}, Train(), None)


def test_a_target_that_no_layer_has_is_refused_with_those_it_has(tmp_path: Path) -> None:
    words = ("train.lora_rank=2", "train.load=x", "train.lora_targets=[q_proj,c_attn]")
    told = "train.lora_targets=[q_proj,c_attn]: the layers of Qwen3ForCausalLM have no linear layer c_attn; they have "
    with pytest.raises(EngineError, match=re.escape(f"{told}down_proj, gate_proj, k_proj")):
        HuggingFaceTask(plan_of(working("qwen3"), tmp_path, *words))


def test_a_run_without_adapters_has_none_to_give(chats: Path, folder: Path, tmp_path: Path) -> None:
    task = HuggingFaceTask(make_run(tmp_path / "run", chats, base=words(folder)).plan)
    with pytest.raises(EngineError, match=r"the run has trained the whole model and no adapters \(train\.lora_rank\)"):
        task.publish(lambda block: {}, tmp_path, adapters=True)
