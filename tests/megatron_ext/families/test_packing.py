"""Samples that are documents: only answers are learned, and documents that share a sample do not see each other. Losses
and weights are those of one process that reads every document alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conf.compose import compose
from conf.errors import ConfigError
from launch import cli
from launch.commands.data import main
from launch.commands.launching.preflight import with_length
from launch.control.planning.plan import make_plan
from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Documents
from megatron_ext.families.huggingface.anatomy import logits_of
from megatron_ext.families.tasks import task_of
from megatron_ext.inference.held_out import whole_model
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.cut import cut_between
from megatron_ext.tasks.language.language_task import NextTokenTask
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.families.test_huggingface import NAMED, not_working, plan_of
from tests.megatron_ext.families.test_huggingface_weights import LAYOUTS, theirs
from tests.support import ROOT
from tests.support.chat_model import save_model, sums, write_lines
from tests.support.megatron_ext import tiny_transformers
from tests.support.megatron_ext.engine_run import TINY, EngineRun, make_run
from tests.support.megatron_ext.textbook import Ours
from tests.support.megatron_ext.tiny_transformers import VOCAB, whole, working

ITERATIONS, BATCH = 3, 8
CONSTANT = (
    *("train.lr=1e-3", "train.min_lr=0", "train.lr_policy=constant", "train.lr_warmup_iterations=0"),
    *("train.weight_decay=0", "train.clip_grad=0", f"train.iterations={ITERATIONS}", "train.log_interval=1"),
    *(f"parallel.global_batch_size={BATCH}", "train.comm_timeout_s=120", "parallel.partition=null"),
)
"""With which torch's own optimizer does the same."""
Logits = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("published") / "model"
    save_model(found)
    return found


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    at = tmp_path_factory.mktemp("chats")
    several = [[*one, *two] for one, two in zip(sums(6), sums(6)[::-1], strict=True)]
    lines = write_lines(at / "chats.jsonl", [{"messages": one} for one in (*sums(6), *several)])
    main(["chats", "--source", str(lines), "--tokenizer", str(folder), "--output", str(at / "data")])
    return at / "data"


def words(folder: Path) -> list[str]:
    return [
        *("model=huggingface", f"model.config={folder}", f"train.load={folder}", "model.sequence_length=48"),
        *("parallel=single", "parallel.micro_batch_size=2", *CONSTANT),
    ]


def documents(task: NextTokenTask, numbers: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, labels and mask of every document of these samples, alone."""
    batch = {name: torch.from_numpy(one) for name, one in task.samples("train", 99).batch(numbers).items()}
    for number in range(len(numbers)):
        tokens, labels, mask = (batch[name][number].long() for name in ("tokens", "labels", "loss_mask"))
        begins = [0, len(tokens)]
        if "positions" in batch:
            begins = [*torch.nonzero(batch["positions"][number] == 0).flatten().tolist(), len(tokens)]
        for first, last in pairwise(begins):
            if mask[first:last].any():
                yield tokens[None, first:last], labels[first:last], mask[first:last]


def losses_alone(plan: Plan, model: torch.nn.Module, logits: Logits) -> list[float]:
    """Of one process, which reads one document after the other."""
    task = task_of(plan)
    assert isinstance(task, NextTokenTask)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses = []
    for iteration in range(ITERATIONS):
        numbers = np.arange(iteration * BATCH, (iteration + 1) * BATCH)
        total, weight = torch.zeros(()), 0
        for tokens, labels, mask in documents(task, numbers):
            each = F.cross_entropy(logits(tokens)[0], labels, reduction="none")
            total, weight = total + (each * mask).sum(), weight + int(mask.sum())
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(total.item() / weight)
    return losses


def of_transformers(plan: Plan, folder: Path) -> list[float]:
    model = theirs(folder)
    return losses_alone(plan, model, lambda tokens: logits_of(model(input_ids=tokens, use_cache=False)))


def assert_same(run: EngineRun, expected: list[float]) -> None:
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)


GATHERED = {
    "gathered weights": ("parallel.data=2", "parallel.zero=3"),
    "gathered weights of one stage": (
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.zero=3-2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"], ids=["a sample each", "packed"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "recompute", *GATHERED])
def test_answers_are_learned_as_transformers_does(
    layout: str, packing: str, chats: Path, folder: Path, tmp_path: Path
) -> None:
    others = GATHERED.get(layout) or LAYOUTS.get(layout, ("parallel.recompute=full", *LAYOUTS["two stages"]))
    others = tuple(one.replace("partition=1-3", "partition=1-2").replace("3-1", "2-1") for one in others)
    run = make_run(tmp_path / "run", chats, *others, f"data.packing={packing}", base=words(folder))
    assert_same(run, of_transformers(run.plan, folder))


GPTS = {
    "learned positions": (),
    "rotary, grouped, no dropout": (
        *("model.position_embedding_type=rope", "model.num_query_groups=2"),
        *("model.hidden_dropout=0", "model.attention_dropout=0"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one process", "two stages", "two replicas", "tensor", "recompute", "selective"])
@pytest.mark.parametrize("gpt", GPTS)
def test_packed_text_is_learned_by_gpt_as_if_documents_were_alone(
    gpt: str, layout: str, corpus: Path, tmp_path: Path
) -> None:
    more = {"recompute": ("parallel.recompute=full",), "selective": ("parallel.recompute=selective",)}
    others = (*CONSTANT, *GPTS[gpt], "parallel=single", "parallel.micro_batch_size=2")
    given = (*others, *more.get(layout, LAYOUTS.get(layout, ())))
    run = make_run(tmp_path / "run", corpus, *given, "data.packing=true", "parallel.partition=null", base=TINY)
    plain = make_plan(with_length(compose([*TINY, f"data.prefix={corpus}", *others])), "test/plain")
    model = Ours(plain)
    number = torch.zeros(1, dtype=torch.int64)
    expected = losses_alone(run.plan, model, lambda tokens: model({"tokens": tokens, "number": number})["logits"])
    assert_same(run, expected)


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_and_its_held_out_answers_are_evaluated(
    chats: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = ("data.packing=true", 'data.split="60,40,0"', "train.eval_interval=1")
    path = tmp_path / "runs" / "mine" / "20260101-120000-0123abcd"
    run = make_run(path, chats, *held_out, "parallel.data=2", base=words(folder))
    assert run.go() == 0, run.stderr()
    (path / "config.yaml").touch()
    assert cli.main(["evaluate", str(path), "--split", "valid"]) == 0
    loss = float(re.search(r"loss +(\S+)", capsys.readouterr().out)[1])
    task = task_of(run.plan)
    model = whole_model(task, Checkpoint.at(path), torch.device("cpu"))
    total, weight = 0.0, 0
    valid = task.samples("valid", 1)
    for number in range(task.epoch("valid") or 0):
        sample = {name: torch.from_numpy(one)[None].long() for name, one in valid.sample(number).items()}
        each = F.cross_entropy(model(sample)["logits"][0], sample["labels"][0], reduction="none")
        total += (each * sample["loss_mask"][0]).sum().item()
        weight += int(sample["loss_mask"].sum())
    assert abs(loss - total / weight) < 1e-3
    more = ("train.iterations=5", *LAYOUTS["two stages"][:1], "parallel.partition=2-1")
    plan = make_plan(with_length(compose([*words(folder), *held_out, *more, f"data.prefix={chats}"])), run.plan.run)
    run.run.write_json(run.run.plan, plan.as_json())
    assert EngineRun(run.run, Plan.read(run.run.plan)).go() == 0, run.stderr()
    assert [line["iteration"] for line in run.metrics() if "loss" in line and "learning_rate" in line] == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["model=mamba-tiny"], "cannot do; leave it out"),
        (
            ["model=tiny", "engine=megatron_lm", "engine.checkout=/tmp"],
            "cannot be combined with engine.kind=megatron_lm; use engine=tdpp",
        ),
    ],
    ids=["states that go on", "another engine"],
)
def test_packing_is_refused_where_documents_would_see_each_other(given: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.packing=true .*{re.escape(told)}"):
        compose([*given, "data.packing=true"])


LENGTHS = (7, 9)
"""Of two documents in a sample; windows of the tiny models are shorter."""


def difference(kind: str, folder: Path) -> float:
    """The largest between a family's logits of documents that share a sample, and of each alone."""
    config = working(kind)
    plan = plan_of(config, folder, "parallel.pipeline=1", "parallel.partition=null")
    task = task_of(replace(plan, data_documents=Documents(packing=True)))
    stage = Stage(task, cut_between(task, [task.blocks])[0], TensorGroup()).eval()
    model = whole(config).eval()
    tokens = torch.randint(3, VOCAB, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    given = {"tokens": tokens, "positions": positions}
    with torch.no_grad():
        found = stage({name: given[name] for name in stage.inputs})["logits"]
        alone = [logits_of(model(input_ids=part, use_cache=False)) for part in tokens.split(LENGTHS, 1)]
    return (found - torch.cat(alone, 1)).abs().max().item()


@pytest.mark.parametrize("kind", NAMED)
def test_documents_of_a_sample_have_the_logits_of_each_alone(kind: str, tmp_path: Path) -> None:
    assert difference(kind, tmp_path) < 1e-5


@pytest.mark.first
@pytest.mark.slow
def test_a_family_keeps_documents_apart_or_refuses_to_pack_them(tmp_path: Path) -> None:
    wrong, refused = {}, {}
    for kind in tiny_transformers.families():
        if kind in not_working():
            continue
        try:
            found = difference(kind, tmp_path)
        except EngineError as error:
            refused[kind] = str(error)
        except Exception as error:  # noqa: BLE001  (all families are tried)
            wrong[kind] = f"{type(error).__name__}: {error}"
        else:
            if not found < 1e-4:
                wrong[kind] = f"{found:.1e}"
    assert not wrong, json.dumps(wrong, indent=1)
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    listed = page.split("told apart: ")[1].split("\n\n")[0]
    assert sorted(refused) == sorted(re.findall(r"`([^`]+)`", listed))
    assert all(
        told.startswith("data.packing=true: ") and told.endswith("leave data.packing out") for told in refused.values()
    )
