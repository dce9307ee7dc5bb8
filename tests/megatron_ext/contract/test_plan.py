"""A plan.json that somebody has changed by hand: one message with the file, the key, the value and the rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.errors import ConfigError, RunFolderError
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.files.run_files import read_run_files
from launch.judge.evidence import plan_line
from megatron_ext import worker
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from reports.readers.record import read
from tests.support import cases

Steps = tuple[str | int, ...]
"""Where a value lies in a plan: keys and places in lists."""

BLEND = "data.blend=[{prefix: b, weight: 0.5}]"
PLANS = {
    "demo": make_plan(compose([BLEND]), "a/b").as_json(),
    "rehearsal": make_plan(
        compose(
            [
                "experiment=seed_a100x1_a10x7",
                *("executor=local", "container=none", "train.precision=fp16", "executor.rehearse=virtual"),
                *("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=null"),
            ]
        ),
        "a/b",
    ).as_json(),
}


def changed(plan: dict[str, Any], steps: Steps, value: Any) -> dict[str, Any]:
    plan = deepcopy(plan)
    holder: Any = plan
    for step in steps[:-1]:
        holder = holder[step]
    holder[steps[-1]] = value
    return plan


def without(plan: dict[str, Any], steps: Steps) -> dict[str, Any]:
    plan = deepcopy(plan)
    holder: Any = plan
    for step in steps[:-1]:
        holder = holder[step]
    del holder[steps[-1]]
    return plan


def places(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    """Of every value in a plan, but for those that are names of the user's own."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in entries:
        if step not in ("version", "environment"):
            yield (*steps, step)
            yield from places(inner, (*steps, step))


def key_of(steps: Steps) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def message(tmp_path: Path, plan: Any) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with pytest.raises(EngineError) as told:
        Plan.read(path)
    text = str(told.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_what_launch_writes_is_read(tmp_path: Path, plan: dict[str, Any]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = Plan.read(tmp_path / "plan.json")
    assert found.folder == tmp_path
    assert [place.rank for place in found.ranks] == list(range(found.world_size))
    assert found.data_blend[1:] == [] or found.data_blend[1].weight == 0.5
    assert found.rehearsal is None or len(found.rehearsal.ranks[0].forward_ns) == 2


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_value_of_another_kind_is_named_with_its_key(tmp_path: Path, plan: dict[str, Any]) -> None:
    """Every value of the plan in turn; a list's first and last stand for all."""
    for steps in places(plan):
        if any(isinstance(step, int) and step > 1 for step in steps):
            continue
        wrong = {"a": 1} if steps[-1] != "rehearsal" else 7
        told = message(tmp_path, changed(plan, steps, wrong))
        assert told.startswith(f"{key_of(steps)}"), told


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_key_is_needed_and_no_other(tmp_path: Path, plan: dict[str, Any]) -> None:
    for steps in places(plan):
        if isinstance(steps[-1], int) or any(isinstance(step, int) and step > 1 for step in steps):
            continue
        if steps == ("train", "mtbf_s"):  # only a run that saves by itself has it
            continue
        assert message(tmp_path, without(plan, steps)) == f"{key_of(steps)} is missing"
        other = (*steps[:-1], f"{steps[-1]}x")
        told = message(tmp_path, changed(plan, other, 1))
        assert told == f"{key_of(other)}=1 is not a key of a plan; did you mean {steps[-1]}?"


RULES: dict[str, tuple[Steps, Any, str]] = {
    "partition-sum": (("partition",), [1, 2], "partition=[1, 2] must be of numbers that add up to model.layers=4"),
    "partition-parts": (("partition",), [1, 1, 2], "partition=[1, 1, 2] must be of pipeline * chunks = 2 * 1 = 2 num"),
    "partition-below-0": (("partition",), [5, -1], "partition[1]=-1 must be at least 0"),
    "layers": (("model", "layers"), 5, "partition=[1, 3] must be of numbers that add up to model.layers=5, not to 4"),
    "family": (("model", "family"), "bart", 'model.family="bart" must be one of gpt, bert, t5'),
    "both-rows": (
        ("model", "family"),
        "t5",
        "partition=[1, 3] must be of numbers that add up to model.layers=4 + model.decoder",
    ),
    "not-its-option": (("model", "decoder_layers"), 2, "model.decoder_layers=2 is only for model.family=t5, transf"),
    "pipeline": (("pipeline",), 4, "partition=[1, 3] must be of pipeline * chunks = 4 * 1 = 4 numbers"),
    "data": (("data",), 1, "ranks=[0, 1, 2, 3] must be tensor * data * pipeline = 1 * 1 * 2 = 2, 0 to 1"),
    "tensor-0": (("tensor",), 0, "tensor=0 must be at least 1"),
    "batch": (("global_batch_size",), 6, "global_batch_size=6 must be a multiple of data * micro_batch_size = 2 * 2"),
    "stage": (("ranks", 2, "stage"), 0, "ranks[2].stage=0 must be 1: rank = (stage * data + dp) * tensor + tp"),
    "rank": (("ranks", 2, "rank"), 3, "ranks[2].rank=3 must be 2: rank = "),
    "node": (("ranks", 2, "node"), 1, "ranks[2].node=1 must be below 1, the number of nodes"),
    "local-rank": (("ranks", 2, "local_rank"), 1, "ranks[2].local_rank=1 must be its place in nodes[0].ranks=[0, 1, 2"),
    "rank-twice": (("nodes", 0, "ranks"), [0, 1, 2, 2], "nodes=[[0, 1, 2, 2]] must be given each of the ranks 0 to 3"),
    "node-name": (("nodes", 0, "name"), "../x", 'nodes[0].name="../x" must be a file\'s name'),
    "environment": (("nodes", 0, "environment"), {"A": 1}, "nodes[0].environment.A=1 must be a text"),
    "heads": (("model", "heads"), 5, "model.heads=5 must be a divisor of model.hidden=64"),
    "padded": (("model", "padded_vocab_size"), 7, "model.padded_vocab_size=7 must be a multiple of tensor=1, and no "),
    "chunks": (("schedule",), "interleaved", "schedule=interleaved needs chunks of at least 2, not 1"),
    "schedule": (("schedule",), "1f1b", 'schedule="1f1b" must be one of gpipe, one_f_one_b, interleaved, zb_h1'),
    "precision": (("train", "precision"), "fp8", 'train.precision="fp8" must be one of fp32, bf16, fp16'),
    "lr": (("train", "lr"), 0, "train.lr=0 must be above 0"),
    "lr-nan": (("train", "lr"), float("nan"), "train.lr=NaN must be a number"),
    "beta": (("train", "adam_beta2"), 1, "train.adam_beta2=1 must be at least 0 and below 1"),
    "min-lr": (("train", "min_lr"), 1, "train.min_lr=1 must be between 0 and train.lr="),
    "warmup": (
        ("train", "lr_warmup_iterations"),
        50,
        "train.lr_warmup_iterations=50 must be at least 0 and less than tr",
    ),
    "iterations": (("train", "iterations"), True, "train.iterations=true must be a whole number"),
    "log-interval": (("train", "log_interval"), 0, "train.log_interval=0 must be at least 1"),
    "port": (("master_port",), 70000, "master_port=70000 must be from 1 to 65535"),
    "split": (("data_split",), [1, 2], "data_split=[1, 2] must be three weights, the first above 0"),
    "blend": (("data_blend",), [{"prefix": "x", "weight": 1}], 'data_blend=["x"] must be empty, or two or more, data_'),
    "device": (("device",), "tpu", 'device="tpu" must be one of cpu, cuda'),
    "version": (("version",), 3, "expected version 1 or 2, found 3"),
    "shares-sum": (
        ("shares",),
        [3, 1],
        "shares=[3, 1] must be micro-batches of 2 that together are global_batch_size=16",
    ),
    "shares-count": (("shares",), [3, 3, 2], "shares=[3, 3, 2] must be of data=2 numbers"),
    "shares-0": (("shares",), [8, 0], "shares[1]=0 must be at least 1"),
}


@pytest.mark.parametrize(("steps", "value", "told"), RULES.values(), ids=RULES.keys())
def test_a_rule_that_does_not_hold_is_told(tmp_path: Path, steps: Steps, value: Any, told: str) -> None:
    assert message(tmp_path, changed(PLANS["demo"], steps, value)).startswith(told)


@pytest.mark.parametrize(
    ("word", "steps", "value"),
    [
        ("model.decoder_layers=2", ("model", "decoder_layers"), 2),
        ("model.rope_scaling_factor=8", ("model", "rope_scaling_factor"), 8.0),
        ("train.nesterov=true", ("train", "nesterov"), True),
        ("train.lr_policy=step", ("train", "lr_policy"), "step"),
        ("parallel.schedule=interleaved", ("schedule",), "interleaved"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_rule_of_a_configuration_and_of_its_plan_has_one_text(
    tmp_path: Path, word: str, steps: Steps, value: Any
) -> None:
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert message(tmp_path, changed(PLANS["demo"], steps, value)) in str(error.value).replace("parallel.", "")


def test_a_missing_rank_is_told(tmp_path: Path) -> None:
    told = "ranks=[0, 1, 3] must be tensor * data * pipeline = 1 * 2 * 2 = 4, 0 to 3"
    assert message(tmp_path, without(PLANS["demo"], ("ranks", 2))) == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (("rehearsal", "ranks", 5), "rehearsal.ranks=31 must be of 32 ranks"),
        (("rehearsal", "ranks", 5, "forward_ns", 0), "rehearsal.ranks[5].forward_ns=["),
    ],
)
def test_a_rehearsal_knows_the_times_of_every_rank(tmp_path: Path, steps: Steps, told: str) -> None:
    assert message(tmp_path, without(PLANS["rehearsal"], steps)).startswith(told)


@pytest.mark.parametrize("content", ["[]", "7", "null", '"plan"', "{", '{"version": 1'])
def test_what_is_no_plan_at_all_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(EngineError, match=r"plan\.json: "):
        Plan.read(tmp_path / "plan.json")


def test_a_worker_trains_nothing_of_such_a_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = changed(PLANS["demo"], ("partition",), [1, 2])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert worker.main([str(tmp_path / "plan.json"), "0"]) == 1
    told = capfd.readouterr().err
    assert told.startswith(f"error: {tmp_path}/plan.json: partition=[1, 2] must be")
    assert not list(tmp_path.glob("*/*"))


GONE = object()


def readers(tmp_path: Path) -> dict[str, tuple[Callable[[], object], type[Exception]]]:
    run = RunDir(tmp_path)
    run.write_json(run.jobs, {"token": "t", "executor": "local", "submission": 0, "jobs": []})
    return {
        "launch": (lambda: plan_line(read_run_files(run).plan), RunFolderError),
        "reports": (lambda: read(run), RunFolderError),
    }


@pytest.mark.parametrize("reader", ["launch", "reports"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_all_who_read_a_plan_say_what_is_wrong_with_it(tmp_path: Path, reader: str, plan: dict[str, Any]) -> None:
    """Whatever value is replaced by whatever: either nobody needs it, or there is one message."""
    look, error = readers(tmp_path)[reader]
    at = [steps for steps in places(plan) if not any(isinstance(step, int) and step > 1 for step in steps)]
    values = (None, -1, 10**400, 1.5, "x", [], {}, [1], [[]], GONE)
    for steps, value in cases.drawn(product(at, values), 300):
        broken = without(plan, steps) if value is GONE else changed(plan, steps, value)
        (tmp_path / "plan.json").write_text(json.dumps(broken))
        try:
            look()
        except error as told:
            assert "plan.json" in str(told), (steps, told)
