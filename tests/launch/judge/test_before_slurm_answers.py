"""What is read before Slurm answers, and what after: a job that starts in between is told for what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.run_files import read_run_files
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.machine.job_states import JobState
from launch.observe.look import finish_observation
from tests.support.launch.run_folders import NOW, OK, Case, Node, ended

WAITING = {"7": JobState(id="7", state="PENDING")}


def on_slurm(run: RunDir) -> RunDir:
    jobs = [{"id": "7", "role": "job", "nodes": [0, 1]}]
    run.write_json(run.jobs, {"token": "t", "executor": "slurm", "submission": 0, "jobs": jobs})
    return run


def test_a_job_that_starts_while_slurm_answers_does_not_wait_to_be_started_again(tmp_path: Path) -> None:
    before = read_run_files(on_slurm(Case([None, None]).make(tmp_path / "run")))
    on_slurm(Case([Node(), Node()]).make(tmp_path / "other"))
    (tmp_path / "run" / "nodes").rmdir()
    (tmp_path / "other" / "nodes").rename(tmp_path / "run" / "nodes")
    seen = finish_observation(before, WAITING, NOW)
    assert (str(seen.start), decide(seen).state) == ("0.0", State.running)


def test_a_job_that_waits_although_its_nodes_have_told_of_a_start_waits_for_the_next(tmp_path: Path) -> None:
    before = read_run_files(on_slurm(Case([Node(), Node()], last=20).make(tmp_path / "run")))
    seen = finish_observation(before, WAITING, NOW)
    assert (str(seen.start), decide(seen).state) == ("0.1", State.starting)


@pytest.mark.parametrize(
    ("nodes", "asks"),
    [
        ([OK, OK], ()),
        ([ended(1), ended(1)], ()),
        ([ended(1), ended(143, "SIGTERM")], ("7",)),
        ([OK, Node()], ("7",)),
        ([OK, None], ("7",)),
    ],
    ids=["succeeded", "failed", "ended from outside: Slurm may know by whom", "at work", "not started"],
)
def test_slurm_is_asked_only_about_what_the_files_do_not_tell(
    tmp_path: Path, nodes: list[Node | None], asks: tuple[str, ...]
) -> None:
    assert read_run_files(on_slurm(Case(nodes).make(tmp_path / "run"))).asks == asks


def test_slurm_is_not_asked_for_ever_who_ended_a_run_that_was_stopped(tmp_path: Path) -> None:
    assert read_run_files(on_slurm(Case([ended(143, "SIGTERM")] * 2, stop=NOW - 9).make(tmp_path / "run"))).asks == ()
