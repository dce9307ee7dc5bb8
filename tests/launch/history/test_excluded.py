"""`cluster.exclude=[auto]` names what Slurm knows: a job that excludes another host is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema.executor import ExecutorKind
from launch.cli import main
from launch.commands.launching import excluded
from launch.commands.searching import plans
from launch.errors import LaunchError
from launch.history.ledger import MANY, announcement
from launch.history.record import RunRecord
from launch.machine import slurm_commands
from tests.launch.history.test_hosts import history

LINE = "{}|gpu2|gpu2*|up|idle|64|UNLIMITED|256000|infinite|10|OFF|gpu:a10:4|a10,ib"
NAMES = {"gpu2-002": "gpu2-002.cluster", "gpu2-006": "login01", "gpu2-007": "a b"}


def records() -> list[RunRecord]:
    """Three hosts fail: a node with its whole name, a login node, and one whose name somebody made up."""
    made = history(1, failed={"gpu2-002": (3, 9), "gpu2-006": (11, 23), "gpu2-007": (12, 24)})
    return [
        replace(run, hosts=tuple(replace(host, host=NAMES.get(host.host, host.host)) for host in run.hosts))
        for run in made
    ]


def left_out(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    monkeypatch.setattr(excluded, "records", lambda *given: records())
    words = ["experiment=seed_a100x1_a10x7", "executor=slurm", "cluster.exclude=[gpu2-001,auto]"]
    cluster, why = excluded.with_excluded(compose(words).cluster, ExecutorKind.slurm, Path("runs"))
    assert why is not None
    return cluster.exclude, why


def test_hosts_that_are_no_nodes_of_slurm_are_not_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "\n".join(LINE.format(f"gpu2-{number:03d}") for number in range(1, 9))
    monkeypatch.setattr(slurm_commands, "nodes", lambda: nodes)
    names, why = left_out(monkeypatch)
    assert names == ["gpu2-001", "gpu2-002"]
    assert "gpu2-002, failing: 2 of its last " in why
    assert why.endswith("; not healthy, but no node of Slurm: a b, login01")


def test_without_an_answer_of_slurm_every_host_with_the_name_of_a_node_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> str:
        raise LaunchError("no sinfo here")

    monkeypatch.setattr(slurm_commands, "nodes", silent)
    assert left_out(monkeypatch)[0] == ["gpu2-001", "gpu2-002.cluster", "login01"]


def test_a_search_asks_slurm_about_hosts_and_not_about_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excluded, "records", lambda *given: records())
    monkeypatch.setattr(slurm_commands, "nodes", lambda: LINE.format("gpu2-002"))
    asked = []
    monkeypatch.setattr(plans, "nodes_now", lambda cluster: asked.append(cluster.exclude) or [])
    words = ["experiment=seed_a100x1_a10x7", "executor=slurm", "cluster.exclude=[auto]", "leave_out=false"]
    assert main(["search", *words, "parallel.schedule=gpipe", "by_stage=false", "top=1"]) == 0
    assert asked == [["gpu2-002"]]


def test_all_combinations_of_a_sweep_ask_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr(excluded, "records", lambda *given: asked.append(given) or records())
    monkeypatch.setattr(slurm_commands, "nodes", lambda: LINE.format("gpu2-002"))
    words = ["experiment=seed_a100x1_a10x7", "cluster.exclude=[auto]", "dry_run=true", f"runs_dir={tmp_path}"]
    main(["launch", "-m", *words, "train.seed=1,2,3"])  # the data are not there, which it says at its end
    assert len(asked) == 1


def test_that_many_runs_are_read_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = announcement(Path("runs"))
    for left in range(50, 0, -1):
        tell(left)
    assert capsys.readouterr().err == "(reading what 50 runs in runs say of their hosts; later it is known)\n"
    announcement(Path("runs"))(MANY - 1)
    assert capsys.readouterr().err == ""
