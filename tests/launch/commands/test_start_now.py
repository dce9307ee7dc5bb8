"""`start=now`: plans by when their trainings would end, with a queue that says when nodes are free."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.errors import SearchError
from launch.commands import search
from launch.commands.launch import main as launch
from launch.commands.searching.queue import Waiting, _to_search, estimates_so_far, sets_of
from launch.errors import LaunchError
from launch.history.record import RunRecord
from launch.judge.state import State

SBATCH = """#!/usr/bin/env python3
import datetime, os, re, sys
text = open(sys.argv[2]).read()
waits = []
for number, block in enumerate(text.split("#SBATCH hetjob")):
    nodes, partition = int(re.search(r"--nodes=([0-9]+)", block)[1]), re.search(r"--partition=(\\S+)", block)[1]
    if partition == "gpu2" and nodes > int(os.environ.get("UP", "7")):
        sys.exit("sbatch: error: Requested node configuration is not available")
    waits.append(int(os.environ["HGX_WAITS"]) if partition == "hgx" else 0)
for number, wait in enumerate(waits):
    start = datetime.datetime.now() + datetime.timedelta(seconds=wait)
    at = start.isoformat(timespec="seconds")
    print(f"sbatch: Job 7+{number} to start at {at} using 8 processors on nodes x", file=sys.stderr)
"""
WORDS = ["experiment=seed_a100x1_a10x7", "model.layers=8", "executor=slurm", "parallel.schedule=one_f_one_b"]
WORDS += ["container=none", "parallel.tensor=1", "parallel.recompute=none", "parallel.sharded_optimizer=false"]


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The A100 node is busy for half an hour."""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HGX_WAITS", "1800")


def first_row(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert search.main([*WORDS, "start=now", *words]) == 0
    return capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("het", ["jobs", pytest.param("hetjob", marks=pytest.mark.slow)])
def test_a_short_training_starts_on_what_is_free_and_a_long_one_waits(
    capsys: pytest.CaptureFixture[str], het: str
) -> None:
    short = first_row(capsys, "train.iterations=500", f"executor.het={het}")
    assert " none " in short
    assert "hgx" not in short
    long = first_row(capsys, "train.iterations=500000", f"executor.het={het}")
    assert " 30 min " in long
    assert "hgx" in long


def test_it_is_said_which_nodes_are_free(capsys: pytest.CaptureFixture[str]) -> None:
    search.main([*WORDS, "start=now", "train.iterations=500"])
    told = capsys.readouterr().err
    assert "(free now, by Slurm: 0 of 1 node of hgx, 7 of 7 nodes of gpu2)" in told
    assert re.search(r"next: tdpp launch .* start=now  # submits the first plan", told)


def test_nodes_that_are_down_are_in_no_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UP", "3")
    assert "gpu2*3 " in first_row(capsys, "train.iterations=500")


def test_a_launch_takes_the_plan_that_ends_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "train.iterations=500", "dry_run=true"]
    assert launch([*words, "start=now"], preflight=lambda experiment: ()) == 0
    told = capsys.readouterr()
    assert re.search(r"\(start=now: gpu2\*\d starts now and trains .*, by Slurm's estimate", told.err)
    assert "sbatch/job.sh" in told.out
    assert "--partition=gpu2" in told.out
    assert "--partition=hgx" not in told.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start=now"], "the training's length is needed"),
        (["start=later", "train.iterations=5"], "start=later must be now"),
        (["start=now", "train.iterations=5", "executor=local"], "add executor=slurm"),
        (["start=now", "train.iterations=5", "pareto=time"], "it does not take pareto"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_says(words: list[str], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        search.main([*WORDS, *words])


def test_a_launch_says_what_start_means() -> None:
    with pytest.raises(LaunchError, match="start=then: must be now"):
        launch([*WORDS, "start=then"])
    with pytest.raises(LaunchError, match="start=now chooses the plan of one run, and -m starts several"):
        launch(["-m", *WORDS, "start=now"])


def test_of_many_sets_some_are_asked_for_and_all_nodes_are_among_them() -> None:
    cluster = compose(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.count=20", "cluster.groups.gpu2.count=30"])
    found = sets_of(cluster.cluster)
    assert len(found) <= 64
    assert {"hgx": 20, "gpu2": 30} in found
    assert {"hgx": 0, "gpu2": 0} not in found


def test_each_time_is_searched_for_by_the_largest_sets_that_start_by_then() -> None:
    times = {(0, 1): 0, (0, 2): 0, (1, 0): 0, (1, 1): 600, (1, 2): 630, (2, 0): 4000, (2, 1): 4000, (2, 2): 4000}
    known = [Waiting(counts={"a": a, "b": b}, seconds=float(time)) for (a, b), time in times.items()]
    assert [tuple(counts.values()) for counts in _to_search(known)] == [(0, 2), (1, 0), (1, 2), (2, 2)]


def test_it_is_said_how_right_the_estimates_were(tmp_path: Path) -> None:
    assert estimates_so_far(tmp_path / "none") is None
    for number, (waited, expected) in enumerate([(10.0, 700.0), (30.0, 20.0), (4000.0, 100.0), (50.0, None)]):
        record = RunRecord(
            run=f"r/{number}",
            state=State.succeeded,
            began_unix=float(number),
            ended_unix=float(number),
            waited_s=waited,
            expected_wait_s=expected,
            hosts=(),
        )
        folder = tmp_path / "r" / str(number)
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text("{}")
        (folder / "history.json").write_text(json.dumps(asdict(record)))
    assert estimates_so_far(tmp_path) == (
        "of the last 3 runs 1 began earlier than Slurm had expected and 1 later; at the median it was off by 12 min"
    )


def test_a_dry_run_shows_the_job_of_the_nodes_that_are_free_and_those_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three nodes are: the third has a job of its own, as the launch would submit it."""
    monkeypatch.setenv("UP", "2")
    words = [*WORDS, "parallel.node_order=gpu2*3", "parallel.pipeline=1", "parallel.partition=null"]
    words += ["parallel.data=12", "parallel.micro_batch_size=1", "parallel.global_batch_size=48", "train.iterations=50"]
    words += ["elastic.enabled=true", "train.save_interval=10", "dry_run=true", "parallel.tensor=1"]
    words += ["cluster.groups.gpu2.gpus_per_node=4"]
    assert launch([*words, "elastic.start=now"], preflight=lambda experiment: ()) == 0
    told = capsys.readouterr().out
    assert told.count("#SBATCH --nodes=") == 2
    job, _, join = told.partition("submitit/join-0-gpu2-2.sh\n")
    assert "sbatch/job.sh\n" in job
    assert "#SBATCH --nodes=2\n" in job
    assert "#SBATCH --nodes=1\n" in join
    assert "agent-0-join-gpu2-2.json" in join
    assert (
        "2 node agents, started by sbatch, and 1 later, each by a job of its own once Slurm has a node for it" in told
    )
    assert "on gpu2-0, and with its own number on each of gpu2-1:" in told
    assert launch(words, preflight=lambda experiment: ()) == 0
    told = capsys.readouterr().out
    assert told.count("#SBATCH --nodes=3\n") == told.count("#SBATCH --nodes=") == 1
