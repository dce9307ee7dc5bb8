"""Evaluations while a run trains: the same under every layout, and training does not notice them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.goal import Best, Target
from megatron_ext.data.gpt_samples import GptSamples, samples_in_epoch
from megatron_ext.data.samples import Split
from megatron_ext.engine.goal import Spending
from megatron_ext.engine.log import keep_lines
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run
from tests.support.megatron_ext.textbook import Ours

DROPOUT = ["model.hidden_dropout=0.3", "model.attention_dropout=0.2"]
TRAIN = ["data.split='70,30,0'", "train.iterations=5", "train.lr=1e-2", *DROPOUT]
EVALUATED = [*TRAIN, "train.eval_interval=2"]
ONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=8"]
LAYOUTS = {
    "micro-batches": ["parallel.data=1", "parallel.pipeline=1", "parallel.micro_batch_size=2"],
    "shares": ["parallel.data=2", "parallel.pipeline=1", "parallel.shares=3-1", "parallel.micro_batch_size=2"],
    "tensor": ["parallel.data=1", "parallel.pipeline=1", "parallel.tensor=2", "parallel.sequence_parallel=true"],
    "pipeline": ["parallel.data=1", "parallel.pipeline=3", "parallel.partition=0-3-0", "parallel.micro_batch_size=1"],
    "zb-h1": [
        *("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=1"),
        *("parallel.schedule=zb_h1", "parallel.recompute=full"),
    ],
    "interleaved": [
        *("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-0-1-1", "parallel.chunks=2"),
        *("parallel.schedule=interleaved", "parallel.micro_batch_size=2", "parallel.recompute=selective"),
    ],
    "unlike-stages": [
        *("parallel.pipeline=2", "parallel.partition=1-2", "parallel.replicas=3-1", "parallel.tensor=1-2"),
        *("parallel.micro_batch_size=1", "parallel.sequence_parallel=true"),
    ],
    "all-at-once": [
        *("parallel.data=2", "parallel.pipeline=2", "parallel.tensor=2", "parallel.partition=2-1"),
        *("parallel.micro_batch_size=2", "parallel.sharded_optimizer=true", "parallel.sequence_parallel=true"),
    ],
}


def evaluations(run: EngineRun) -> dict[int, dict[str, float]]:
    return {
        line["iteration"]: {name: line[name] for name in ("valid_loss", "valid_perplexity")}
        for line in run.metrics()
        if "valid_loss" in line
    }


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    run = make_run(tmp_path_factory.mktemp("alone") / "run", corpus, *ONE, *EVALUATED)
    assert run.go() == 0, run.stderr()
    return run


@pytest.fixture(scope="module")
def still(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Whose weights hardly move: what layouts round differently does not grow."""
    run = make_run(tmp_path_factory.mktemp("still") / "run", corpus, *ONE, *EVALUATED, "train.lr=1e-4")
    assert run.go() == 0, run.stderr()
    return run


def test_it_is_the_loss_of_all_samples_of_the_split_without_dropout(alone: EngineRun, corpus: Path) -> None:
    plan = alone.plan
    count = samples_in_epoch(corpus, plan.data_split, "valid", plan.model.sequence_length)
    assert count % 8, "the last micro-batch is to be a small one"
    split = Split(count, plan.train.seed, tuple(plan.data_split), "valid")
    samples = GptSamples(corpus, split, plan.model.sequence_length, VOCAB)
    assert samples.order["epochs"] == 1
    model, state = Ours(plan).eval(), alone.weights()
    with torch.no_grad():
        for name, (block, inner) in model.stage.places.items():
            parameter = dict(model.stage.parameters_by_name())[name]
            parameter.copy_(state[f"{block if not block.startswith('layers') else 'layer-0000' + block[-1]}.{inner}"])
        tokens = torch.stack([torch.from_numpy(samples.tokens(number)) for number in range(count)])
        logits = model({"tokens": tokens[:, :-1], "number": torch.arange(count)})["logits"][..., :VOCAB]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    found = evaluations(alone)
    assert list(found) == [2, 4, 5]
    assert found[5]["valid_loss"] == pytest.approx(loss, abs=1e-6)
    assert found[5]["valid_perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)


def test_training_does_not_notice_it(alone: EngineRun, engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*ONE, *TRAIN)
    assert run.go() == 0, run.stderr()
    assert run.losses().tolist() == alone.losses().tolist()
    for name, tensor in run.state().items():
        assert torch.equal(tensor, alone.state()[name]), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same(layout: list[str], still: EngineRun, engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*layout, *EVALUATED, "train.lr=1e-4", "train.best=loss")
    assert run.go() == 0, run.stderr()
    found, expected = evaluations(run), evaluations(still)
    assert found.keys() == expected.keys()
    for iteration, values in expected.items():
        assert found[iteration] == pytest.approx(values, rel=1e-6, abs=1e-6)
    assert Checkpoint.at(run.run.path / "checkpoints" / "best").meta.evaluation is not None


def test_eval_iterations_takes_the_first_global_batches(engine_run: Callable[..., EngineRun]) -> None:
    run, split = (
        engine_run(*LAYOUTS["shares"], *EVALUATED, *more, name=name)
        for name, more in (("some", ["train.eval_iterations=1"]), ("all", ["train.eval_iterations=1000"]))
    )
    whole = engine_run(*LAYOUTS["shares"], *EVALUATED, name="whole")
    for one in (run, split, whole):
        assert one.go() == 0, one.stderr()
    assert evaluations(split) == evaluations(whole)
    assert evaluations(run)[5]["valid_loss"] != pytest.approx(evaluations(whole)[5]["valid_loss"], abs=1e-4)


def test_a_run_ends_where_it_has_reached_its_goal_and_keeps_its_best(engine_run: Callable[..., EngineRun]) -> None:
    goal = ["train.iterations=60", "train.lr=3e-3", "train.eval_interval=3", "train.best=perplexity"]
    run = engine_run(*LAYOUTS["zb-h1"], *EVALUATED, *goal, "train.until=loss<=3.9", "train.keep_checkpoints=1")
    assert run.go() == 0, run.stderr()
    found = evaluations(run)
    last = max(found)
    assert 3 < last < 60
    assert found[last]["valid_loss"] <= 3.9 < min(found[n]["valid_loss"] for n in found if n < last)
    said = json.loads(run.plan.files.goal.read_text())
    assert said == {
        "iteration": last,
        "ended_by": "until",
        "limit": "loss<=3.9",
        "value": found[last]["valid_loss"],
    }
    best = Checkpoint.at(run.plan.files.best_checkpoint)
    assert best.meta.iteration == last
    assert best.meta.evaluation == {"loss": found[last]["valid_loss"], "perplexity": found[last]["valid_perplexity"]}
    assert run.go() == 0, "started again, it has nothing left to do"
    assert evaluations(run) == found


def test_the_best_checkpoint_stays_and_a_new_start_knows_it(engine_run: Callable[..., EngineRun]) -> None:
    options = [*EVALUATED, "train.eval_interval=1", "train.best=loss", "train.keep_checkpoints=1", "train.lr=0.5"]
    options += ["train.min_lr=0.5", "train.clip_grad=0"]  # it diverges: the first is the best
    run = engine_run(*ONE, *options, "train.iterations=3")
    assert run.go() == 0, run.stderr()
    values = evaluations(run)
    first = min(values, key=lambda n: values[n]["valid_loss"])
    assert first < 3
    again = run.replan(*LAYOUTS["shares"], *options, "train.iterations=6")
    assert again.go() == 0, again.stderr()
    values = evaluations(again)
    wanted = min(values, key=lambda n: values[n]["valid_loss"])
    assert Checkpoint.at(run.plan.files.best_checkpoint).meta.iteration == wanted
    assert {path.name for path in run.plan.files.checkpoints.glob("iter_*")} == {f"iter_{n:07d}" for n in (wanted, 6)}


def test_a_metric_that_no_evaluation_gives_ends_the_run(engine_run: Callable[..., EngineRun]) -> None:
    run = engine_run(*ONE, *EVALUATED, "train.best=loss")
    content = json.loads(run.run.plan.read_text())
    content["train"]["best"] = "bleu"
    run.run.plan.write_text(json.dumps(content))
    assert run.go() == 1
    assert "train.best=bleu: an evaluation gives loss, perplexity; use one of these" in run.errors()[0]["message"]


@pytest.mark.parametrize("text", ["", "loss", "loss<2", "loss<=x", "loss<=nan", "<=2", "loss<=inf", "2>=loss"])
def test_what_is_no_target_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="a metric, <= or >=, and a number"):
        Target.parse(text)


def test_targets_and_what_is_better() -> None:
    assert Target.parse("bleu >= 24.61") == ("bleu", True, 24.61)
    assert Target.parse("loss<=2").reached({"loss": 2.0})
    assert not Target.parse("loss<=2").reached({"loss": float("nan")})
    assert Best.parse("bleu") == ("bleu", True) == Best.parse("max:bleu")
    assert Best.parse("loss").better(1.0, float("nan"))
    assert not Best.parse("loss").better(float("nan"), 1.0)
    assert not Best.parse("min:mine").better(1.0, 1.0)
    with pytest.raises(ValueError, match="min:METRIC"):
        Best.parse("mine")


def test_a_run_saves_and_ends_when_it_has_cost_what_it_may(engine_run: Callable[..., EngineRun]) -> None:
    """At a dollar a second; started again it has spent it already."""
    cost = ["cluster.groups.local.price_per_hour=3600", "train.max_cost=1.5", "train.iterations=100000"]
    run = engine_run(*LAYOUTS["shares"], *cost)
    assert run.go() == 0, run.stderr()
    said = json.loads(run.plan.files.goal.read_text())
    assert said["ended_by"] == "max_cost"
    assert said["limit"] == "1.5"
    assert 1.5 <= said["value"] < 10
    assert Checkpoint.at(run.run.path).meta.iteration == said["iteration"] < 100000
    costs = [line["cost"] for line in run.metrics()]
    assert costs == sorted(costs)
    assert run.go() == 0, run.stderr()
    again = json.loads(run.plan.files.goal.read_text())
    assert said["iteration"] < again["iteration"] <= said["iteration"] + 2
    assert again["value"] > said["value"]


def test_no_start_forgets_what_those_before_it_have_cost(engine_run: Callable[..., EngineRun]) -> None:
    """Also where one is killed before its first line, with the lines dropped that said it, and so again."""
    plan = engine_run("cluster.groups.local.price_per_hour=3600", "train.max_cost=100").plan
    seconds = [0.0]
    first = Spending(plan, lambda: seconds[0])
    plan.files.metrics.write_text(json.dumps({"iteration": 7, "cost": 30.0}) + "\n")
    seconds[0] = 30.0
    first.iterated()
    for number in range(3):
        next_ = Spending(plan, lambda: seconds[0])
        keep_lines(plan.files.metrics, 0)
        assert next_.dollars == pytest.approx(30.0 + 6.0 * number)
        seconds[0] += 6.0
        next_.iterated()
    plan.files.spent.unlink()  # of a run that an earlier tdpp has begun
    plan.files.metrics.write_text(json.dumps({"iteration": 7, "cost": 31.0}) + "\n")
    for _ in range(2):
        assert Spending(plan, lambda: seconds[0]).dollars == pytest.approx(31.0)
        keep_lines(plan.files.metrics, 0)


def test_what_iterations_send_between_groups_counts(engine_run: Callable[..., EngineRun]) -> None:
    """Also in the starts that follow, and beside the time of the nodes."""
    plan = engine_run("cluster.groups.local.price_per_hour=3600", "train.max_cost=100").plan
    plan = replace(plan, train=replace(plan.train, traffic_price=7.0))
    seconds = [0.0]
    first = Spending(plan, lambda: seconds[0])
    for _ in range(3):
        seconds[0] += 10.0
        first.iterated()
    assert first.dollars == pytest.approx(3 * (10.0 + 7.0))
    assert not first.over
    next_ = Spending(plan, lambda: seconds[0])
    assert next_.dollars == first.dollars
    for _ in range(7):
        next_.iterated()
    assert next_.over


def test_a_run_that_goes_on_from_anothers_goal_trains_all_the_same(engine_run: Callable[..., EngineRun]) -> None:
    first = engine_run(*ONE, *EVALUATED, "train.until=loss<=100", name="first")
    assert first.go() == 0, first.stderr()
    assert Checkpoint.at(first.run.path).meta.iteration == 2
    load = [f"train.load={first.run.path}", "train.iterations=3", "train.until=loss<=0.1"]
    second = engine_run(*ONE, *EVALUATED, *load, name="second")
    assert second.go() == 0, second.stderr()
    assert [line["iteration"] for line in second.metrics()] == [3]
    assert not second.plan.files.goal.exists()
    third = engine_run(*ONE, *EVALUATED, *load, "train.until=loss<=100", name="third")
    assert third.go() == 0, third.stderr()
    assert [line["iteration"] for line in third.metrics()] == [3]
    assert json.loads(third.plan.files.goal.read_text())["iteration"] == 3
