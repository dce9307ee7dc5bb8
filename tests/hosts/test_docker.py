"""Runs on hosts that ssh reaches, in containers of docker: each host has a daemon and images of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.commands import stop as stop_command
from launch.commands.doctor import main as doctor_command
from launch.control.follow import follow
from launch.judge.state import State
from launch.judge.verdict import judge
from tests.support.hosts.fleet import Fleet
from tests.support.launch.live import FOREVER, no_data_needed, ranks, start, wait_for, wait_until_running

IN_DOCKER = ("executor=hosts", "executor.hosts=[a:2,b:2]", "container=docker", "container.image=lab:1")
ONE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.fixture
def mounted(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return f"data.prefix={tmp_path}/data/none"


def living(folders: dict[str, Path]) -> list[str]:
    return [f"{name}: {path.name}" for name, folder in folders.items() for path in folder.glob("containers/*")]


def test_they_run_on_both_and_leave_nothing(fleet: Fleet, tmp_path: Path, mounted: str) -> None:
    folders = fleet.docker({"a": ONE, "b": ONE})
    run = start(tmp_path / "runs", *IN_DOCKER, mounted)
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    assert [run.read_json(run.node_state(name))["image"] for name in "ab"] == [ONE] * 2
    assert living(folders) == []


def test_stop_removes_them_although_the_agents_are_gone(fleet: Fleet, tmp_path: Path, mounted: str) -> None:
    folders = fleet.docker({"a": ONE, "b": ONE})
    run = start(tmp_path / "runs", *IN_DOCKER, mounted, *FOREVER)
    wait_until_running(run)
    assert len(living(folders)) == 2
    for name in "ab":
        agent = run.read_json(run.node_state(name))["pid"]
        fleet.call(name, "kill", "-STOP", str(agent))
    assert stop_command.main([str(run.path)]) == 0
    wait_for(lambda: living(folders) == [])


def test_a_killed_rank_is_named(fleet: Fleet, tmp_path: Path, mounted: str) -> None:
    folders = fleet.docker({"a": ONE, "b": ONE})
    run = start(tmp_path / "runs", *IN_DOCKER, mounted, *FOREVER)
    wait_until_running(run)
    fleet.call("b", "kill", "-KILL", str(ranks(run)[3]))
    wait_for(lambda: judge(run).state is State.failed)
    assert judge(run).reason.startswith("rank 3 (stage 1, dp 1, tp 0, node b) was killed by SIGKILL")
    wait_for(lambda: living(folders) == [])


def test_the_doctor_compares_their_images(
    fleet: Fleet, tmp_path: Path, mounted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.docker({"a": ONE, "b": OTHER})
    assert doctor_command([*IN_DOCKER, mounted, f"runs_dir={tmp_path}/runs", "--json"], preflight=no_data_needed) == 1
    found = {(one["where"], one["what"]): one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["all nodes", "image"]["level"] == "error"
    assert f"{ONE} on a; {OTHER} on b: put the same" in found["all nodes", "image"]["text"]
