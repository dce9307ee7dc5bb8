"""`tdpp search`: a table, a file that launch takes, and one message for what cannot be."""

from __future__ import annotations

import csv
import io
import re
import shlex
from pathlib import Path

import pytest
import yaml
from rich.progress import Progress

from conf.compose import compose
from fasop.search.progress import bar
from launch.cli import main
from launch.commands.searching import plans as searching
from tests.support.ordinary_user import ordinary_user

SMALL = (
    *("cluster=a10x8", "cluster.groups.gpu2.count=2", "model=xl", "parallel.global_batch_size=16"),
    "parallel.schedule=one_f_one_b",
)


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(searching, "PLANS", tmp_path)
    return tmp_path


def test_a_proof_is_made_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A bound is given without."""
    large = [*SMALL, "parallel.pipeline=8", "top=1"]
    assert main(["search", *large]) == 0
    told = capsys.readouterr()
    assert main(["search", *large, "prove=true"]) == 0
    proved = capsys.readouterr()
    assert "% faster. prove=true may tighten these bounds." in told.err
    assert "prove=true may" not in proved.err
    assert not any(line.startswith(" ") for line in proved.err.splitlines())
    assert "gain" not in proved.err

    def faster(text: str) -> list[float]:
        """How much faster plans of a set may be, sentence by sentence: sizes, layouts, layers per stage."""
        (line,) = (line for line in text.splitlines() if line.startswith("Proved: "))
        return [
            float((re.findall(r"([\d.]+)% faster", one) or ["0"])[0])
            for one in re.split(r"\. ", line.split(" prove=")[0])
        ]

    assert all(after <= before for before, after in zip(faster(told.err), faster(proved.err), strict=True))
    assert faster(proved.err)[0] < faster(told.err)[0]
    assert "has the best layers per stage." in proved.err
    assert proved.out == told.out


def test_plans_are_ranked_on_stdout_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "top=3", f"csv={tmp_path / 'plans.csv'}"]) == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["1", "2", "3"]
    assert re.search(r"(?m)in the one node order\..*\nProved: no plan with equal shares", told.err)
    with (tmp_path / "plans.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == [
        *("rank", "mbs", "tp", "dp", "pp", "node placement", "partition", "estimated time (step/s)", "pipeline time"),
        *("DP all-reduce time", "embedding layer all-reduce time", "price_per_step", "train_cost", "gpus"),
        *("expert", "context", "sequence_parallel", "recompute", "sharded_optimizer", "zero", "shards", "offload"),
        *("reduce_dtype", "compress", "scatter_messages", "hierarchical_reduce", "global_batch_size", "schedule"),
        *("chunks", "shares", "islands"),
        *("optimizer_s", "bound_s", "samples_per_s", "price_per_hour", "kwh_per_step", "train_days"),
        "lost_to_failures",
        "basis",
        *("idle_gpus", "idle_nodes"),
    ]
    times = [float(row["estimated time (step/s)"]) for row in rows]
    assert times == sorted(times)
    for row in rows:
        parts = [float(row[key]) for key in ("pipeline time", "DP all-reduce time", "embedding layer all-reduce time")]
        assert float(row["estimated time (step/s)"]) == pytest.approx(sum(parts), abs=1e-5)
        assert float(row["bound_s"]) <= float(row["estimated time (step/s)"])


def test_a_row_of_the_file_has_every_key_of_its_plan(tmp_path: Path) -> None:
    files = [f"csv={tmp_path / 'plans.csv'}", f"plan={tmp_path / 'best.yaml'}"]
    assert main(["search", *SMALL, "parallel.zero=3", "parallel.data=2", "by_stage=false", "top=1", *files]) == 0
    (row,) = csv.DictReader((tmp_path / "plans.csv").open())
    plan = yaml.safe_load((tmp_path / "best.yaml").read_text())
    theirs = {"tensor": "tp", "data": "dp", "pipeline": "pp", "micro_batch_size": "mbs", "node_order": "node placement"}
    told = {key: yaml.safe_load(row[theirs.get(key, key)]) for key in plan}
    assert told == {key: yaml.safe_load(str(value)) for key, value in plan.items()}
    assert (row["zero"], row["offload"]) == ("3", "none")


def test_a_plan_is_explained_to_its_last_millisecond_and_gibibyte(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "top=2", "explain=2"]) == 0
    ranked, times, memory, slower = capsys.readouterr().out.split("\n\n")
    iteration = float(ranked.splitlines()[2].split(" ms")[0].split()[-1])
    *stages, shares = (line.split() for line in times.splitlines()[2:])
    assert [sum(map(float, row[3:])) for row in stages] == pytest.approx([iteration] * len(stages), abs=0.5)
    assert sum(float(share.rstrip("%")) for share in shares[1:]) == pytest.approx(100, abs=0.5)
    for row in memory.splitlines()[2:]:
        *parts, together, has, left = map(float, row.split()[3:])
        assert (sum(parts), has - left) == (pytest.approx(together, abs=0.05), pytest.approx(together, abs=0.05))
    usual, *cases = (re.fullmatch(r"(.*?) +([0-9.]+) ms +([0-9.]+)%", line) for line in slower.splitlines()[2:])
    assert usual is not None
    assert (usual[1], float(usual[2])) == ("nothing", iteration)
    for case in cases:
        assert case is not None
        assert float(case[2]) == pytest.approx(iteration * (1 + float(case[3]) / 100), rel=1e-3)


def test_a_row_that_is_not_there_cannot_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "top=1", "explain=100000"]) == 1
    assert re.search(r"explain=100000: the table has \d+ rows; choose one", capsys.readouterr().err)


def test_a_row_below_those_that_are_asked_for_is_shown_to_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["robust=10%"]):
        assert main(["search", *SMALL, *more, "top=1", "explain=2"]) == 0
        ranked, *_ = capsys.readouterr().out.split("\n\n")
        assert [line.split()[0] for line in ranked.splitlines()[1:]] == ["1", "2"]


def test_launch_takes_the_best_plan_unchanged(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "plan=found"]) == 0
    assert "parallel=found is the first plan (" in capsys.readouterr().out
    keys = yaml.safe_load((plans / "found.yaml").read_text())
    one = compose(["train=gpt2", *SMALL, *(f"parallel.{key}={value}" for key, value in keys.items())])
    assert {key: str(getattr(one.parallel, key)) for key in keys} == {key: str(value) for key, value in keys.items()}
    assert sum(one.partition.layers) == 48


@pytest.mark.parametrize("experiment", ["seed_a10x8", "seed_a100x1_a10x7"])
def test_an_experiment_takes_another_plan(experiment: str) -> None:
    """Its own is a choice of the group `parallel`, too, so that `parallel=NAME` replaces all of it."""
    found = compose(
        [f"experiment={experiment}", "parallel=single", "parallel.data=32", "parallel.global_batch_size=64"]
    )
    assert (found.parallel.pipeline, found.parallel.partition, found.parallel.node_order) == (1, None, None)


def test_a_plan_is_not_overwritten_unless_told(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plans / "mine.yaml").write_text("mine")
    assert main(["search", *SMALL, "plan=mine"]) == 1
    assert "mine.yaml already exists; choose another name, or add overwrite=true" in capsys.readouterr().err
    assert (plans / "mine.yaml").read_text() == "mine"
    assert main(["search", *SMALL, "plan=mine", "overwrite=true"]) == 0


def test_a_plan_that_cannot_be_written_is_told_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(searching, "PLANS", Path())
    with ordinary_user():
        assert main(["search", *SMALL, "plan=mine"]) == 1
    told = capsys.readouterr()
    way_out = "give the path of a file instead, such as ./mine.yaml"
    assert f"plan=mine: you may not write to .; {way_out}" in told.err
    assert not told.out


def test_a_plan_may_be_written_to_any_file_and_launch_takes_that(
    plans: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path_factory.mktemp("any where") / "best.yaml"
    assert main(["search", *SMALL, "top=1", f"plan={own}"]) == 0
    told, said = capsys.readouterr()
    assert f"parallel={own} is the first plan ({own})" in told
    launch = shlex.split(said.splitlines()[-1].removeprefix("next: "), comments=True)
    assert (launch[:2], launch[-1]) == (["tdpp", "launch"], f"parallel={own}")
    assert compose(launch[2:]).parallel.partition in told
    assert not list(plans.iterdir())
    assert compose(["train=gpt2", *SMALL, f"parallel={own}"]).parallel.partition in told
    assert main(["search", *SMALL, f"plan={own}"]) == 1
    assert f"plan={own}: {own} already exists; choose another name, or add overwrite=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["top=0"], "top=0 must be a whole number, at least 1"),
        (["overwrite=yes"], "overwrite=yes must be true or false"),
        (
            ["plan=../x"],
            "plan='../x' cannot name a configuration: use letters, digits, '_' and '-', or the path of a file",
        ),
        (["plan=/nowhere/x.yaml"], "plan=/nowhere/x.yaml: no folder /nowhere; create it, or choose another one"),
        (["csv=/nowhere/plans.csv"], "cannot write /nowhere/plans.csv: no folder /nowhere"),
        (["page=/"], "cannot write /: this is a folder"),
        (["pareto=time", "top=3", "leave_out=true"], "pareto=time shows the plans that no other plan found beats"),
        (["validate=a", "csv=b.csv"], "validate=a does not search, so it does not take csv, only"),
        (["cluster=nope"], "Could not find 'cluster/nope'"),
        (
            ["cluster.nope=1"],
            "cluster.nope is not a key; did you mean cluster.name",
        ),
        (["+train.nope=1"], "train.nope is not a key"),
        (["parallel.global_batch_size=1.5"], "must be a whole number, not '1.5'"),
        (["topp=3"], "did you mean top=?"),
        (["top=1000000000000"], "top=1000000000000 must be at most 10000"),
        (["robust=10"], "robust=10 must be a percentage above 0 and up to 1000%, such as 10%"),
        (["robust=0%"], "robust='0%' must be a percentage"),
        (["robust=5%", "pareto=time"], "it does not take robust"),
        (["parallel.schedule=nope"], "parallel.schedule=nope must be one of gpipe, one_f_one_b"),
        (["parallel.schedule_file=a.json"], "parallel.schedule_file=a.json cannot be searched"),
        (
            ["cluster=local", "parallel=single"],
            "cluster.groups.local.gpus_per_node=null: a prediction needs the number",
        ),
        (["cluster.gpus.a10.profile=nope"], "no profile 'nope'"),
    ],
    ids=[
        *(
            "top",
            "overwrite",
            "name",
            "file-name",
            "csv",
            "page",
            "pareto",
            "validate",
            "choice",
            "key",
            "new-key",
            "value",
            "word",
            *("most", "percent", "nothing", "robust-front"),
        ),
        *("schedule", "file", "nodes", "profile"),
    ],
)
def test_what_cannot_be_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = [] if words[0] == "cluster=local" else SMALL
    assert main(["search", *small, *words]) == 1
    told = capsys.readouterr()
    assert told.err.count("tdpp: error:") == 1
    assert message in told.err
    assert not told.out


def test_times_that_were_not_measured_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "model=small", "top=1"]) == 0
    told = capsys.readouterr()
    assert "not measured" in told.out
    assert "(not measured: what the GPUs' peak rates allow; real runs take longer)" in told.err


@pytest.mark.parametrize(
    ("word", "told"),
    [("top=1", "(defaults in use: train.precision=fp32)\n"), ("train.precision=fp16", "")],
    ids=["default", "given"],
)
def test_what_was_taken_by_default_is_named_first(word: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, word]) == 0
    found = capsys.readouterr().err
    assert found.startswith(told)
    assert found.count("defaults in use") == bool(told)


@pytest.mark.parametrize(("name", "told"), [("a10", False), ("a100_40gb", True)], ids=["its-own", "another"])
def test_the_profile_of_another_gpu_is_told(name: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, "train.precision=fp16", f"cluster.gpus.a10.profile={name}", "top=1"]) == 0
    assert ("(profile 'a100_40gb' is for A100-40GB, not for A10)" in capsys.readouterr().err) == told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_bar_is_shown_on_a_terminal_only(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with bar("searching") as told:
        told(0.25)
    assert ("searching" in stream.getvalue()) == stream.isatty()


def test_a_bar_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search goes through several phases, each from nothing to all, and some of them twice."""
    monkeypatch.setattr("sys.stderr", Terminal())
    shown: list[float] = []
    monkeypatch.setattr(Progress, "update", lambda _bar, _task, completed: shown.append(completed))
    with bar("searching", phases=2) as told:
        for done in (0.5, 1.0, 0.25, 1.0, 0.1, 1.0):
            told(done)
    assert shown == [0.25, 0.5, 0.625, 1.0, 1.0, 1.0]
