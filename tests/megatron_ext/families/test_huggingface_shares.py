"""A tensor group that shares out the layers of transformers computes what one process does."""

from __future__ import annotations

import os
import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conf.errors import ConfigError
from megatron_ext.contract.errors import EngineError
from megatron_ext.families.huggingface.task import HuggingFaceTask
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import NAMED, batches, losses_whole, not_working, plan_of
from tests.support.megatron_ext import tiny_transformers
from tests.support.megatron_ext.tiny_transformers import working

RANKS = 2
LIMIT = timedelta(minutes=5)
OTHERWISE: dict[str, dict[str, Any]] = {
    "": {},
    "tied": {"tie_word_embeddings": True},
    "odd": {"vocab_size": 131, "pad_token_id": 70},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def config_of(kind: str) -> Any:
    """`kind` may name what is otherwise in its configuration."""
    family, _, other = kind.partition(" ")
    config = working(family)
    for key, value in OTHERWISE[other].items():
        setattr(config, key, value)
    return config


def trained(config: Any, folder: Path, tensor: TensorGroup) -> list[float]:
    """The losses of a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    task = HuggingFaceTask(plan_of(config, folder, "parallel.pipeline=1", f"parallel.tensor={tensor.size}"))
    return losses_of(task, Stage(task, cut_between(task, [task.blocks])[0], tensor), tensor)


def losses_of(task: HuggingFaceTask, stage: Stage, tensor: TensorGroup) -> list[float]:
    parameters = [one for _, one in stage.parameters_by_name()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for batch in batches():
        micro = task.micro({"tokens": batch, "number": torch.arange(2)})
        loss = task.loss(stage({name: micro.inputs[name] for name in stage.inputs}), micro, tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(
    kinds: Sequence[str], folder: Path, trained: Callable[[Any, Path, TensorGroup], list[float]] = trained
) -> dict[str, Any]:
    """By family, the losses of all ranks, or what a rank raised."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                store = dist.FileStore(str(folder / "store"), RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
                found: dict[str, Any] = {}
                for kind in kinds:
                    try:
                        group = TensorGroup(RANKS, rank, dist.group.WORLD)
                        found[kind] = trained(config_of(kind), folder / f"{rank}.{kind}", group)
                    except Exception as error:  # noqa: BLE001  (all families are tried)
                        found[kind] = f"{type(error).__name__}: {error}"
                        if not isinstance(error, EngineError):
                            traceback.print_exc()
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    of = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    return {kind: [one[kind] for one in of] for kind in kinds}


def shared_out(kind: str, folder: Path) -> None:
    (found,) = on_ranks([kind], folder).values()
    expected = losses_whole(config_of(kind))
    for losses in found:
        assert losses == pytest.approx(expected, abs=1e-5), losses


@pytest.mark.parametrize("kind", [kind for kind in NAMED if kind != "gpt_oss"])
def test_a_tensor_group_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    shared_out(kind, tmp_path)


@pytest.mark.parametrize(
    "kind",
    ["qwen3 tied", "llama odd", "llama biases", "deepseek_v3", "gemma3n_text"],
    ids=[
        *("the head's matrix is the embedding", "a vocabulary that is not even", "biases of rows"),
        *("latent attention", "scaled embeddings and streams"),
    ],
)
def test_whatever_is_shared_out_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    shared_out(kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        ("gpt_oss", 2, "transformers has no tensor plan for it (base_model_tp_plan)"),
        ("llama", 4, "num_key_value_heads=2 is not a multiple of 4"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused_by_name(kind: str, size: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=re.escape(told)) as error:
        HuggingFaceTask(plan_of(working(kind), tmp_path, "parallel.pipeline=1", f"parallel.tensor={size}"))
    assert str(error.value).startswith(f"parallel.tensor={size} is not possible with ")


def test_heads_that_a_group_cannot_share_are_refused_when_a_run_is_launched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.heads=4 is not divisible by parallel\.tensor=3"):
        plan_of(working("llama"), tmp_path, "parallel.pipeline=1", "parallel.tensor=3")


def test_sequence_parallelism_is_refused(tmp_path: Path) -> None:
    words = ("parallel.pipeline=1", "parallel.tensor=2", "parallel.sequence_parallel=true")
    with pytest.raises(ConfigError, match=r"parallel\.sequence_parallel=true cannot be combined with .*=huggingface"):
        plan_of(working("llama"), tmp_path, *words)


UNSHARED = {"diffusion_gemma_text", "doge", "dots3_note_text", "glm5_next_text", "gpt_oss", "molmo2_text"}
"""Families whose plan does not fit their layers, or that have none; of the first, rounding decides the losses (see the
page)."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(tiny_transformers.PARTS))
def test_every_family_with_a_tensor_plan_trains_as_one_process(part: int, tmp_path: Path) -> None:
    kinds = [kind for kind in tiny_transformers.families() if kind not in UNSHARED.union(not_working())]
    # First, so that the ranks are forked from a process that has imported these families
    expected = {kind: losses_whole(config_of(kind)) for kind in kinds[part :: tiny_transformers.PARTS]}
    wrong = {}
    for kind, found in on_ranks([*expected], tmp_path).items():
        # AdamW makes much of the last bits of gradients that are nearly 0: of two families' the third loss shows it
        if any(isinstance(one, str) or one != pytest.approx(expected[kind], abs=3e-5) for one in found):
            wrong[kind] = found[0]
    assert not wrong, wrong
