"""What is known of a node that cannot see the run's folder: from Slurm's answers, and from what a job printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files.run_files import read_run_files
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.machine.job_states import JobState, expanded, parse_sacct, parse_squeue
from launch.node.peers import JobFate
from launch.node.slurm_job import SlurmJob
from launch.observe.look import finish_observation
from tests.support.launch.run_folders import NOW, Case, Node, ended

JOBS = [{"id": "11", "role": "master", "nodes": [0]}, {"id": "12", "role": "slave", "nodes": [1]}]


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", ()),
        ("None assigned", ()),
        ("hgx-001", ("hgx-001",)),
        ("gpu2-[001-003]", ("gpu2-001", "gpu2-002", "gpu2-003")),
        ("a[1,9-11],b,c[07-08]-ib", ("a1", "a9", "a10", "a11", "b", "c07-ib", "c08-ib")),
        ("rack[1-2]node[1-2]", ("rack[1-2]node[1-2]",)),
    ],
    ids=str,
)
def test_slurms_way_to_write_hosts(nodelist: str, hosts: tuple[str, ...]) -> None:
    assert expanded(nodelist) == hosts


def test_a_job_that_was_not_launched_is_known_with_its_hosts() -> None:
    failed = JobState(id="12", state="FAILED", detail="JobLaunchFailure", hosts=("a1", "a2"))
    assert str(parse_squeue("12|FAILED|JobLaunchFailure|10:00|a[1-2]\n")["12"]) == str(failed)
    assert parse_sacct("12|FAILED|0:53|a[1-2]\n") == {"12": failed}
    assert parse_sacct("12|FAILED|1:0|a[1-2]\n")["12"].detail == ""


def test_the_hosts_of_a_heterogeneous_job_are_in_the_order_of_its_tasks() -> None:
    text = "12+1|RUNNING|None|9:00|gpu2-[001-002]\n12+0|RUNNING|None|9:00|hgx-001\n"
    assert parse_squeue(text)["12"].hosts == ("hgx-001", "gpu2-001", "gpu2-002")


def made(tmp_path: Path, *nodes: Node | None) -> RunDir:
    run = Case(list(nodes)).make(tmp_path / "runs" / "tiny" / "run")
    run.submitit.mkdir()
    run.write_json(run.jobs, {"token": "t", "executor": "slurm", "submission": 0, "jobs": JOBS})
    return run


def state(job: str, state: str, detail: str = "") -> JobState:
    return JobState(id=job, state=state, detail=detail, hosts=(f"host-{job}",))


def test_the_first_node_of_a_job_that_was_not_launched_and_left_nothing(tmp_path: Path) -> None:
    run = made(tmp_path, ended(1, reason="ended because node local-1 will not start: job 12 is FAILED"), None)
    answers = {"11": state("11", "FAILED"), "12": state("12", "FAILED", "JobLaunchFailure")}
    verdict = decide(finish_observation(read_run_files(run), answers, NOW))
    assert (verdict.state, verdict.rule) == (State.failed, "runs-dir-unseen")
    assert verdict.reason == (
        f"node local-1: host-12 cannot see or write to runs_dir={tmp_path}/runs (Slurm could not launch "
        "job 12 there, and the folder has nothing of it); choose a folder that all nodes share"
    )
    (run.submitit / "12_batch.out").touch()
    assert decide(finish_observation(read_run_files(run), answers, NOW)).rule == "job-ended"


COMPLAINT = "/usr/bin/bash: line 1: {log}: Permission denied\nsrun: error: host-12: task 0: Exited with exit code 1\n"


def test_a_node_whose_agent_could_not_open_its_output_is_known_while_the_others_wait_for_it(tmp_path: Path) -> None:
    run = made(tmp_path, Node(), None)
    (run.submitit / "12_batch.out").write_text(COMPLAINT.format(log=run.submitit / "12_0_log.out"))
    answers = {"11": state("11", "RUNNING"), "12": state("12", "RUNNING")}
    verdict = decide(finish_observation(read_run_files(run), answers, NOW))
    assert (verdict.state, verdict.rule) == (State.failed, "runs-dir-unseen")
    told = f"host-12 cannot see or write to runs_dir={tmp_path}/runs (Permission denied); choose"
    assert verdict.reason.startswith(f"node local-1: {told}")
    found = SlurmJob(run, "11", 0, (0,), task=0).other("local-1", 0.0)
    assert found is not None
    assert found.fate is JobFate.over
    assert found.text.startswith(told.replace("host-12", "its host"))


@pytest.mark.parametrize(
    "said",
    [
        "{folder}/13_0_log.out: Permission denied\n",
        "{folder}/12_1_log.out: Permission denied\n",
        "/elsewhere/12_0_log.out: Permission denied\n",
        "{folder}/12_0_log.out\n",
    ],
    ids=["of-another-job", "of-a-task-that-is-not-there", "of-another-folder", "without-a-reason"],
)
def test_other_words_are_no_complaint_of_a_node(tmp_path: Path, said: str) -> None:
    run = made(tmp_path, Node(), None)
    (run.submitit / "12_batch.out").write_text(said.format(folder=run.submitit))
    answers = {"11": state("11", "RUNNING"), "12": state("12", "RUNNING")}
    assert decide(finish_observation(read_run_files(run), answers, NOW)).state is State.starting


def test_what_an_earlier_start_of_the_job_printed_is_not_about_this_one(tmp_path: Path) -> None:
    run = made(tmp_path, None, None)
    (run.submitit / "12_batch.out").write_text(COMPLAINT.format(log=run.submitit / "12_0_log.out"))
    assert SlurmJob(run, "11", 1, (0, 1), task=0).other("local-1", 0.0) is None
