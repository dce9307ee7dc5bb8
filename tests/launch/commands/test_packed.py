"""`pack=true`: the runs of a sweep share a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.commands.launch import main
from launch.commands.launching.packed import packed
from launch.errors import LaunchError
from launch.sweep.start import Combination

WORDS = ["experiment=seed_a100x1_a10x7", "model.layers=8", "executor=slurm", "parallel.schedule=one_f_one_b"]
WORDS += ["container=none", "parallel.tensor=1", "parallel.recompute=none", "parallel.sharded_optimizer=false"]
WORDS += ["dry_run=true"]
SWEEP = ["-m", *WORDS, "train.lr=1e-4,2e-4,3e-4"]


def packing(words: Sequence[str]) -> list[str]:
    return [] if any(word.startswith("pack=") for word in words) else ["pack=true"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main([*SWEEP, *packing(words), *words], preflight=lambda experiment: ()) == 0
    told = capsys.readouterr()
    return told.out, told.err


def test_each_run_gets_nodes_and_the_gain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys, "train.iterations=1000")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert sorted(row[1] for row in rows) == ["train.lr=0.0001", "train.lr=0.0002", "train.lr=0.0003"]
    at_once = [row[2] for row in rows if row[3] == "0.00"]
    used = [int(count or 1) for nodes in at_once for count in re.findall(r"gpu2(?:\*(\d))?", nodes)]
    assert len(at_once) > 1
    assert sum(used) <= 7
    assert re.search(r"the last of 3 runs has trained after .* sooner than one after another, .*; proved: ", err)


def test_runs_that_follow_one_another_wait_for_those_that_had_their_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, "train.iterations=1000", "cluster.groups.gpu2.count=1", "parallel.pipeline=8")
    assert "--dependency=afterany:<jobs of run 1>" in out.replace("'", "")
    assert "--dependency=afterany:<jobs of runs 1-2>" in out.replace("'", "")


def test_each_run_gets_the_nodes_on_which_it_costs_least(capsys: pytest.CaptureFixture[str]) -> None:
    """A node of A100 for the price of one of A10 is the cheapest, whatever it delays."""
    prices = ["cluster.groups.hgx.price_per_hour=1", "cluster.groups.gpu2.price_per_hour=1"]
    out, err = shown(capsys, "train.iterations=1000", *prices, "pack=cost")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[2] for row in rows] == ["hgx"] * 3
    assert re.search(r"pack=cost: by the prediction the 3 runs cost \$[\d.]+, \d+% less than with pack=true", err)


def test_bytes_between_groups_cost_as_nodes_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes for nothing: only their traffic keeps a run from the nodes of both groups."""
    words = ["train.iterations=1000", "pack=cost", "model.layers=16", "train.lr=1e-4,2e-4"]
    words += ["cluster.groups.hgx.price_per_hour=0", "cluster.groups.gpu2.price_per_hour=0"]
    priced = "+cluster.links={hgx: {gpu2: {price_per_gb: 2}}, gpu2: {hgx: {price_per_gb: 3}}}"
    for link, together in (([], True), ([priced], False)):
        out, err = shown(capsys, *words, *link)
        nodes = [line.split()[2] for line in out.splitlines()[1:3]]
        assert any("+" in one for one in nodes) == together
        assert "cost $0.00, " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORDS, "train.iterations=9"], "add -m and a key with several values"),
        ([*SWEEP, "train.iterations=9", "max_jobs=2"], "max_jobs=2 does too; leave out one"),
        ([*SWEEP, "train.iterations=9", "executor=local"], "add executor=slurm"),
        ([*SWEEP, "train.iterations=null", "train.epochs=2"], "needs the length of each run"),
        ([*SWEEP, "train.iterations=9", "cluster.groups.gpu2.count=1,2"], "packs runs on one cluster"),
        (
            [*SWEEP, "train.iterations=9", "cluster.groups.gpu2.price_per_hour=null", "pack=cost"],
            "give cluster.groups.*price_per_hour",
        ),
        ([*SWEEP, "train.iterations=9", "pack=money"], "pack=money must be true, false or cost"),
    ],
    ids=["one run", "another limit", "no Slurm", "unknown length", "two clusters", "no price", "no packing"],
)
def test_what_it_cannot_do_it_says(words: list[str], message: str) -> None:
    with pytest.raises(TdppError, match=message):
        main([*words, *packing(words)], preflight=lambda experiment: ())


MINUTES = {"s": 1 / 60, "min": 1.0, "h": 60.0}


@pytest.mark.slow
def test_a_rehearsal_of_the_runs_ends_when_it_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run takes what its iterations take in virtual time, from when those that it waits for have ended."""
    lengths = [4000, 7000, 9000, 12000]
    given = [(*WORDS[:-1], f"train.iterations={length}") for length in lengths]
    unset = LaunchError("not composed")
    found = packed([Combination(overrides=words, composed=unset) for words in given], [], {})
    said = re.search(r"has trained after ([\d.]+) (\w+),", capsys.readouterr().err)
    assert said is not None
    ends: dict[int, float] = {}
    for number in found.order:
        kept = [w for w in found.combinations[number].overrides if not w.startswith(("executor=", "train.iterations="))]
        rehearsed = ["executor=local", "executor.rehearse=virtual", "train.iterations=6", "train.log_interval=1"]
        runs = tmp_path / str(number)
        assert main([*kept, *rehearsed, f"runs_dir={runs}"], preflight=lambda experiment: ()) == 0
        lines = RunDir.find(runs, None).metrics.read_text().splitlines()
        last = [json.loads(line)["elapsed_ms"] for line in lines][-2:]
        minutes = sum(last) / len(last) / 60e3 * lengths[number]
        ends[number] = max([0.0, *(ends[other] for other in found.waits[number])]) + minutes
    assert max(ends.values()) == pytest.approx(float(said[1]) * MINUTES[said[2]], rel=0.05)
