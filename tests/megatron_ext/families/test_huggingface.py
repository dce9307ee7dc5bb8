"""Models of transformers, cut into stages, train as transformers' own whole model does in one process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.families.huggingface.anatomy import logits_of
from megatron_ext.families.huggingface.library import config_of
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.stage import Stage
from tests.support import ROOT
from tests.support.megatron_ext import tiny_transformers
from tests.support.megatron_ext.tiny_transformers import VOCAB, whole, working

NAMED = (*("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "mistral", "olmo2", "phi3", "gpt_oss"),)
ITERATIONS, LENGTH = 3, 16


def plan_of(config: Any, folder: Path, *words: str) -> Plan:
    content = {**config.to_dict(), "model_type": config.model_type}
    file = folder / "config.json"
    file.write_text(json.dumps(content, default=str))
    experiment = compose(
        [
            *("model=huggingface", f"model.config={file}", f"model.sequence_length={LENGTH}", "train.seed=1"),
            *("parallel=single", "parallel.pipeline=2", "parallel.micro_batch_size=2", "parallel.global_batch_size=2"),
            *words,
        ]
    )
    return make_plan(experiment, "test/huggingface")


def batches() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (2, LENGTH + 1), generator=source) for _ in range(ITERATIONS)]


def losses_whole(config: Any) -> list[float]:
    model = whole(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        loss = F.cross_entropy(
            logits_of(model(input_ids=batch[:, :-1], use_cache=False)).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_cut(plan: Plan) -> list[float]:
    """Of two stages that pass only what crosses their cut, each with an optimizer of its own."""
    task = HuggingFaceTask(plan)
    tensor = TensorGroup()
    stages = [Stage(task, part, tensor) for part in cut(task, [1, plan.model.layers - 1])]
    named = {name: one for stage in stages for name, one in stage.parameters_by_name()}
    optimizers = [torch.optim.AdamW([one for _, one in stage.parameters_by_name()], lr=1e-3) for stage in stages]
    losses = []
    for batch in batches():
        micro = task.micro({"tokens": batch, "number": torch.arange(2)})
        left = stages[0]({name: micro.inputs[name] for name in stages[0].inputs})
        entered = {name: one.detach().requires_grad_(one.requires_grad) for name, one in left.items()}
        given = stages[1]({**entered, **{name: micro.inputs[name] for name in stages[1].inputs}})
        loss = task.loss(given, micro, tensor)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        back = [name for name in left if left[name].requires_grad]
        torch.autograd.backward([left[name] for name in back], [entered[name].grad for name in back])
        for copy, owner in task.tied.items():
            if copy in named and owner in named:
                total = named[copy].grad + named[owner].grad
                named[copy].grad, named[owner].grad = total, total.clone()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def difference(kind: str, folder: Path) -> float:
    """The largest between a family's losses cut and whole; raises where it cannot be cut."""
    config = working(kind)
    expected = losses_whole(config)
    found = losses_cut(plan_of(config, folder))
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", NAMED)
def test_a_family_that_is_cut_trains_as_whole(kind: str, tmp_path: Path) -> None:
    assert difference(kind, tmp_path) < 1e-5


@pytest.mark.parametrize(
    "kind",
    ["glm_moe_dsa", "glm5_next_text", "gemma3n_text", "apertus", "longcat_flash", "diffusion_gemma_text"],
    ids=[
        *("a layer takes the tokens that the one before selected", "some layers select none"),
        *("hidden states of several streams", "bounds made by an activation's __init__", "two layers in one"),
        "keys and values kept in training",
    ],
)
def test_what_some_families_do_otherwise_is_cut_as_well(kind: str, tmp_path: Path) -> None:
    assert difference(kind, tmp_path) < 1e-5


def test_a_model_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(working("llama"), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EngineError, match=r"needs transformers where its ranks run.*pip install 'transformers>=5'"):
        HuggingFaceTask(plan)


def test_a_model_without_a_config_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.config is not set, but model\.family=huggingface needs it"):
        compose(["model.family=huggingface", "parallel.partition=null"])


def test_a_profile_of_other_lengths_is_another_one() -> None:
    config = ROOT / "tests" / "support" / "megatron_ext" / "qwen3.json"
    words = ["model=huggingface", f"model.config={config}", "parallel.partition=null"]
    names = {compose([*words, f"model.sequence_length={length}"]).model.code_name for length in (32, 64)}
    assert names == {"huggingface with 32 tokens", "huggingface with 64 tokens"}


def not_working() -> dict[str, str]:
    """The families of the page's tables, with their reasons."""
    page = (ROOT / "docs" / "models.md").read_text()
    section = page.split("### Families that cannot be trained")[1].split("\n#")[0]
    return {
        kind: reason
        for kinds, reason in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", section, re.M)
        for kind in re.findall(r"`([^`]+)`", kinds)
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", range(tiny_transformers.PARTS))
def test_every_family_with_a_plan_trains_as_whole_but_those_that_the_page_lists(part: int, tmp_path: Path) -> None:
    every, wrong, listed = tiny_transformers.families(), {}, set(not_working())
    for kind in every[part :: tiny_transformers.PARTS]:
        try:
            found = difference(kind, tmp_path)
        except Exception as error:  # noqa: BLE001  (all families are tried)
            wrong[kind] = f"{type(error).__name__}: {error}"
        else:
            if not found < 1e-5:
                wrong[kind] = f"{found:.1e}"
    print(json.dumps(wrong, indent=1))
    assert {*wrong} == listed & {*every[part :: tiny_transformers.PARTS]}, json.dumps(wrong, indent=1)
    assert listed <= {*every}


def test_a_config_names_no_code_that_would_be_downloaded_and_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    inner = {"attn_implementation": "somebody/kernel", "num_hidden_layers": 2}
    content: Any = {
        "model_type": "gemma3",
        "_attn_implementation_internal": "somebody/kernel",
        "text_config": inner,
        **inner,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = config_of(cast("Any", SimpleNamespace(config=str(tmp_path))))
    assert [found._attn_implementation, found.text_config._attn_implementation] == [None, None]
    assert found.text_config.num_hidden_layers == 2
