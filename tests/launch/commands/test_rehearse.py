"""`tdpp rehearse learning`: plans trained in one process, and ranked by time to quality."""

from __future__ import annotations

import csv
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.simulation.predict import predict
from launch import cli
from launch.commands import rehearse
from launch.control.planning.plan import make_plan
from launch.learning.plans import compared
from launch.learning.table import BatchTimes
from megatron_ext.learning.learn import learn
from tests.support import ROOT
from tests.support.megatron_ext.engine_run import TINY, make_corpus
from tests.support.reports.figures import drawn

DATA = ("data.split='70,30,0'", "train.eval_interval=2", "train.iterations=4", "parallel.micro_batch_size=1")
SAMPLES = ("train.samples=80", "train.iterations=null")
UNTIED = "model.untie_embeddings_and_output_weights=true"
PLANS = {
    "data.yaml": "data: 2\n",
    "flush.yaml": "pipeline: 2\nschedule: gpipe\n",
    "async.yaml": "pipeline: 2\nschedule: pipedream\nreplicas: 2-1\n",
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, text in PLANS.items():
        Path(name).write_text(text)
    plain = [word for word in TINY if not word.startswith("train.iterations")]
    return [*plain, f"data.prefix={make_corpus(tmp_path)}", *DATA, UNTIED]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["rehearse", "learning", *words]) == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


@pytest.mark.slow
def test_three_plans_of_which_two_learn_the_same(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, train = [], rehearse.learn
    monkeypatch.setattr(rehearse, "learn", lambda plan, metric: trained.append(plan) or train(plan, metric))
    choice = "parallel=data.yaml,flush.yaml,async.yaml"
    text = said(capsys, *words, choice, "seeds=2", "csv=plans.csv", "page=plans.html")
    assert len(trained) == 4
    assert {plan.train.seed for plan in trained} == {1234, 1235}
    with Path("plans.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert len(lines) == 6
    by_plan = {name: [line for line in lines if line["plan"] == name] for name in ("data", "flush", "async")}
    for name, rows in by_plan.items():
        experiment = compose([*words, f"parallel={name}.yaml"])
        last = [one.metrics["loss"] for one in learn(make_plan(experiment, "run")) if one.metrics][-1]
        assert float(rows[0]["loss"]) == pytest.approx(last, rel=1e-6)
        assert float(rows[0]["iteration_s"]) == pytest.approx(predict(experiment).iteration_s)
        assert name in text
    assert [row["loss"] for row in by_plan["data"]] == [row["loss"] for row in by_plan["flush"]]
    assert [row["loss"] for row in by_plan["data"]] != [row["loss"] for row in by_plan["async"]]
    times = [float(line["time_to_goal_s"]) for line in lines[::2]]
    assert times == sorted(times)
    samples, seconds = drawn(Path("plans.html").read_text())
    curves = {one["name"]: one for one in samples["data"] if one.get("name") in by_plan}
    assert curves["async"]["x"] == [16, 32]
    late = {one["name"]: one["x"][-1] for one in seconds["data"] if one.get("name") in by_plan}
    assert late["async"] == pytest.approx(4 * float(by_plan["async"][0]["iteration_s"]))


def test_a_difference_that_is_noise_is_called_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", "learning", *words, "parallel=data.yaml,async.yaml", "seeds=2"]) == 0
    shown = capsys.readouterr().err
    assert "noise" in shown
    assert "iB, in one process" in shown
    assert cli.main(["rehearse", "learning", *words, "parallel=data.yaml,async.yaml", "seeds=1"]) == 0
    shown = capsys.readouterr().err
    assert "one seed" in shown
    assert "within noise" not in shown


def test_a_small_model_has_the_delays_of_a_large_plan(words: list[str]) -> None:
    large = [
        "cluster=a10x8",
        "model=xl",
        "executor=slurm",
        UNTIED,
        "parallel.schedule=pipedream",
        "parallel.pipeline=4",
    ]
    sizes = ["parallel.replicas=10-8-8-6", "parallel.partition=6-14-14-14", "parallel.global_batch_size=512"]
    layers = ["small.model=tiny", "small.model.layers=7", f"small.{UNTIED}", "small.parallel.global_batch_size=64"]
    data = [f"small.{word}" for word in words if word.startswith(("data.", "train."))]
    micro = ["parallel.micro_batch_size=8", "parallel.semantics=vertical,stashing"]
    first, second = compared([*large, *sizes, *micro, *layers, *data], compose)
    assert (first.name, second.name) == ("semantics=vertical", "semantics=stashing")
    assert first.experiment.model.layers == 48
    parallel = first.small.parallel
    assert parallel.stream == first.experiment.parallel.stream
    assert first.small.partition.layers == (1, 2, 2, 2)
    assert (parallel.micro_batch_size, parallel.global_batch_size) == (1, 64)
    assert first.small.model.hidden == compose(["model=tiny"]).model.hidden


def test_every_stage_of_a_small_model_has_a_layer(words: list[str]) -> None:
    stages = ["parallel.schedule=pipedream", "parallel.pipeline=4", "model.layers=12", "parallel.partition=9-1-1-1"]
    (plan,) = compared([*words, *stages, "small.model.layers=5"], compose)
    assert plan.small.partition.layers == (2, 1, 1, 1)


def test_a_batch_that_adapts_beside_one_that_stays(words: list[str]) -> None:
    """Its iterations take what is predicted of their batches; small micro-batches have bounds in proportion."""
    adapt = ("adapt.rule=similarity", "adapt.target=0.99", "adapt.every=2", "adapt.rate=0.5", "parallel.data=2")
    given = [*(word for word in words if not word.startswith("train.iterations")), *SAMPLES, *adapt]
    given += ["parallel.micro_batch_size=2", "small.parallel.global_batch_size=4"]
    plans = compared([*given, "adapt.upper=8,32"], compose)
    times = rehearse.predicted(plans)
    fixed, adapted = rehearse.train(plans, 1, "loss", times)
    (curve,) = adapted.curves
    counts = [count for count, _ in curve.batches]
    assert counts[:4] == [4, 4, 6, 6]
    assert max(counts) == 16  # 32 samples, in micro-batches of 2; the small ones have 1
    assert len(counts) < len(fixed.curves[0].batches)
    assert curve.samples[-1] == sum(counts)
    plain = [word for word in given if not word.startswith(("small.", "adapt."))]
    of_fourth = predict(compose([*plain, "parallel.global_batch_size=12"])).iteration_s
    assert curve.batches[2] == (6, False)
    alone = replace(curve, iterations=[2, 3]).timed(BatchTimes(plans[1].experiment).seconds).seconds
    assert alone[1] - alone[0] == pytest.approx(of_fourth, rel=1e-9)
    assert adapted.seconds(curve.samples[-1], curve) == curve.seconds[-1]
    assert {count for count, _ in fixed.curves[0].batches} == {4}


STREAM = ("parallel.schedule=pipedream", "parallel.pipeline=2")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["train.eval_interval=null"], "train.eval_interval=1"),
        (["train.load=runs/demo"], "starts from new weights"),
        (["seeds=99"], "seeds=99 must be at most 10"),
        (["small.train.lr=1e-3,2e-3"], "small.train.lr=1e-3,2e-3: all plans train the same small model"),
        (["small.parallel.pipeline=2"], "small.parallel.pipeline=2"),
        (["small.parallel.global_batch_size=7"], "nearest that can: 8"),
        (["parallel.global_batch_size=8,16"], "give train.samples=N"),
        ([*STREAM, "small.model.layers=1"], "such as small.model.layers=2"),
        ([*STREAM, "parallel.depth=1-1-1"], "parallel.depth=1-1-1 is for 3 stages"),
        (["adapt.rule=jabas"], "adapt.rule=jabas"),
        (["adapt.rule=goodput", "adapt.upper=32", *SAMPLES], "adapt.rule=goodput: its batches depend on the times"),
        (["parallel.semantics=vertical,stashing"], "semantics=vertical: parallel.semantics=vertical works only with"),
        (["train.until=top-1>=0.9"], "an evaluation with model.family=gpt measures loss and perplexity"),
        (["model.layers=3", "modle.layers=3"], "modle"),
        (["data.prefix=nothing"], "nothing"),
        (["parallel=glob(*)"], "give the names"),
        (["csv=no/such/folder/x.csv"], "no/such/folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_rehearsed_is_one_message(
    words: list[str], capsys: pytest.CaptureFixture[str], others: Sequence[str], message: str
) -> None:
    shown = said(capsys, *words, *others, code=1)
    assert message in shown
    assert shown.startswith("tdpp: error: ")
    assert len(shown.splitlines()) == 1


def test_a_plan_that_diverges_is_a_result(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["train.lr=1e-3,1e6", "train.clip_grad=0", "train.optimizer=sgd", "seeds=1", *STREAM]
    text = said(capsys, *words, *wild)
    first, last = text.splitlines()[1:]
    assert first.startswith("train.lr=0.001")
    assert "diverged (1 of 1)" in last


def test_other_rehearsals_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rehearse", "time"]) == 2
    assert "executor.rehearse=virtual" in capsys.readouterr().err
    assert cli.main(["rehearse", "--help"]) == 0
    assert "small.KEY=VALUE" in capsys.readouterr().out


def test_what_is_left_open_is_chosen_as_for_a_launch(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = [word for word in words if not word.startswith("parallel.micro_batch_size")]
    assert cli.main(["rehearse", "learning", *plain, "parallel.micro_batch_size=auto", "seeds=1"]) == 0
    assert "parallel.micro_batch_size=auto: " in capsys.readouterr().err


def test_islands_are_compared_with_synchronous_training_also_by_a_small_one(words: list[str]) -> None:
    every = ["parallel.data=2", "train.sync_every=null,2", "small.train=demo", *DATA]
    plain, islands = compared([*words, *every, "small.train.eval_interval=2"], compose)
    assert (plain.small.train.sync_every, islands.small.train.sync_every) == (None, 2)
    assert islands.layout == f"{plain.layout}, 2 islands every 2"
    assert make_plan(islands.small, "rehearsal").islands == [1, 1]
    assert make_plan(plain.small, "rehearsal").data == 1
    losses = [[one.loss for one in learn(make_plan(one.small, "rehearsal"))] for one in (plain, islands)]
    assert losses[0][0] == pytest.approx(losses[1][0])
    assert losses[0][1:4] != pytest.approx(losses[1][1:4])


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the profile, and on few iterations."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "learning-rehearsal.md").read_text().replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") and "a10x8" not in line]
    changed = {"profile": None, "train.iterations": "4", "train.epochs": None, "train.eval_interval": "2", "seeds": "1"}
    ran = 0
    for line in lines:
        words = shlex.split(line)
        if words[0] != "tdpp":
            assert subprocess.run(["sh", "-c", line], check=False).returncode == 0
        elif words[1] == "rehearse":
            kept = [word for word in words[1:] if word.partition("=")[0] not in changed]
            few = [f"{key}={value}" for key, value in changed.items() if value is not None]
            if "train.samples=19200" in kept:
                kept.remove("train.samples=19200")
                few = [word.replace("train.iterations=4", "train.samples=192") for word in few]
            assert cli.main([*kept, *few, "train.lr_warmup_iterations=1"]) == 0
            ran += 1
        elif words[1] == "data":
            assert cli.main(words[1:]) == 0
    assert ran == 4
    assert "3-1" in capsys.readouterr().out
    assert Path("plans.html").is_file()


def test_more_than_the_machines_memory_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse.os, "sysconf", lambda _: 300)
    shown = said(capsys, *words, code=1)
    assert "but this machine has 87.9 KiB" in shown
    assert "small.model=" in shown
