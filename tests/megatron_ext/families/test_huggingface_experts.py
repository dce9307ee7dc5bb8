"""Experts of transformers' models are balanced by the loss that transformers adds, and their tokens are counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface import routing
from megatron_ext.families.huggingface.anatomy import logits_of
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import batches, losses_cut, losses_whole, plan_of
from tests.support.megatron_ext.tiny_transformers import whole, working

FACTOR = 0.1
BALANCED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "phimoe", "jetmoe", "ernie4_5_moe")


def balancing(kind: str) -> Any:
    config = working(kind)
    config.output_router_logits = True
    config.router_aux_loss_coef = config.aux_loss_coef = FACTOR
    return config


def losses_balanced(config: Any) -> list[float]:
    """Of transformers' whole model with the loss that it adds itself."""
    model: Any = whole(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        out = model(input_ids=batch[:, :-1], use_cache=False)
        loss = F.cross_entropy(logits_of(out).flatten(0, 1), batch[:, 1:].flatten())
        loss = loss + FACTOR * out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", BALANCED)
def test_the_loss_that_balances_experts_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    config = balancing(kind)
    expected = losses_balanced(config)
    assert expected[0] > losses_whole(working(kind))[0] + FACTOR  # it is about FACTOR times the experts of a token
    found = losses_cut(plan_of(config, tmp_path))
    assert found == pytest.approx(expected, abs=1e-5)


def whole_stage(config: Any, folder: Path) -> tuple[HuggingFaceTask, Stage]:
    task = HuggingFaceTask(plan_of(config, folder, "parallel.pipeline=1"))
    return task, Stage(task, cut_between(task, [task.blocks])[0], TensorGroup())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_tokens_of_each_expert_are_counted(kind: str, tmp_path: Path) -> None:
    task, stage = whole_stage(working(kind), tmp_path)
    seen = []

    def note(_: Any, args: Any) -> None:
        seen.append([int((args[1] == number).sum()) for number in range(4)])

    for module in stage.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(note)
    micro = task.micro({"tokens": batches()[0], "number": torch.arange(2)})
    left = stage({name: micro.inputs[name] for name in stage.inputs})
    loads = task.expert_loads(left, micro)
    assert loads is not None
    assert len(seen) == len(loads) > 0
    expected = torch.tensor(seen, dtype=torch.float32)
    torch.testing.assert_close(loads, expected * 4 / expected.sum(1, keepdim=True))
    assert task.metrics(left, micro, TensorGroup()) == {}


def test_a_model_without_experts_counts_none(tmp_path: Path) -> None:
    task, stage = whole_stage(working("llama"), tmp_path)
    micro = task.micro({"tokens": batches()[0], "number": torch.arange(2)})
    assert task.expert_loads(stage({name: micro.inputs[name] for name in stage.inputs}), micro) is None
    assert task.outputs == ("logits",)


def test_the_perplexity_is_that_of_the_tokens_alone(tmp_path: Path) -> None:
    task, _ = whole_stage(balancing("mixtral"), tmp_path)
    plain, _ = whole_stage(working("mixtral"), tmp_path)
    assert plain.evaluated({"loss": 2.0}) == {"loss": 2.0, "perplexity": pytest.approx(7.389056)}
    found = task.evaluated({"loss": 2.2, "load_balancing_loss": 2.0})
    assert found == {"loss": 2.2, "load_balancing_loss": 2.0, "perplexity": pytest.approx(7.389056)}


def test_a_loss_that_is_computed_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *_: torch.tensor(3.0))
    plan = plan_of(balancing("mixtral"), tmp_path)
    told = "output_router_logits=true has transformers add a loss to a MixtralForCausalLM"
    with pytest.raises(EngineError, match=re.escape(told)):
        HuggingFaceTask(plan)
    assert routing.ASKED in told
