"""How runs of two Slurm jobs, a node in each, are judged by what Slurm says of the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch.commands import status
from launch.files.run_files import read_run_files
from launch.judge.state import State
from launch.judge.verdict import decide
from launch.machine.job_states import JobState
from launch.observe.look import finish_observation
from launch.observe.observation import Observation
from tests.support.launch.run_folders import NOW, Case, Error, Node, ended

GAVE_UP = "ended because node local-1 did not start within 5 min (executor.meet_min): job 12 is PENDING (Resources)"
LOST_RANK = Error(0, NOW - 3, "PeerLost", "lost rank 2", symptom=True)
KILLED = Error(2, NOW - 4, "Killed", "killed by SIGKILL: by somebody, or by the kernel because memory ran out")


def seen_of(tmp_path: Path, case: Case, *states: str) -> Observation:
    """Job 11 has node local-0, job 12 node local-1; the states are as sacct tells them, such as `CANCELLED by 0`."""
    run = case.make(tmp_path / "run")
    jobs = [{"id": "11", "role": "master", "nodes": [0]}, {"id": "12", "role": "slave", "nodes": [1]}]
    run.write_json(run.jobs, {"token": "t", "executor": "slurm", "submission": 0, "jobs": jobs})
    told = dict(zip(("11", "12"), states, strict=True))
    answers = {
        job: JobState(id=job, state=state.partition(" ")[0], detail=state.partition(" ")[2])
        for job, state in told.items()
    }
    return finish_observation(read_run_files(run), answers, NOW)


CASES = {
    "the-waiting-job-was-taken-out-of-the-queue-by-the-run-itself": (
        Case([replace(ended(143, "SIGTERM", reason=GAVE_UP), withdrew=("12",)), None]),
        ("FAILED", "CANCELLED by 0"),
        (State.failed, "node-gave-up", f"node local-0 {GAVE_UP}"),
    ),
    "the-waiting-job-was-cancelled-by-somebody": (
        Case([ended(143, "SIGTERM", reason="ended because node local-1 will not start: job 12 is CANCELLED"), None]),
        ("FAILED", "CANCELLED by 1000"),
        (State.failed, "cancelled", "node local-1 is gone before it started: job 12 is CANCELLED (by 1000)"),
    ),
    "the-first-job-was-cancelled-and-took-the-waiting-one-along": (
        Case([replace(ended(143, "SIGTERM"), withdrew=("12",)), None]),
        ("CANCELLED by 1000", "CANCELLED by 0"),
        (State.failed, "cancelled", "node local-0 was ended from outside by SIGTERM: job 11 is CANCELLED (by 1000)"),
    ),
    "a-container-that-cannot-be-made-took-the-waiting-job-along": (
        Case([replace(ended(1, reason="could not prepare its container: no"), withdrew=("12",)), None]),
        ("FAILED", "CANCELLED by 0"),
        (State.failed, "node-gave-up", "node local-0 could not prepare its container: no"),
    ),
    "a-node-was-set-down-and-slurm-has-not-told": (
        Case([Node(), Node()], [KILLED, LOST_RANK], last=20),
        ("RUNNING", "COMPLETING"),
        (State.failing, "rank-or-node", "rank 2 (stage 1, dp 0, tp 0, node local-1) was killed by SIGKILL"),
    ),
    "a-node-was-set-down": (
        Case([ended(1), Node()], [KILLED, LOST_RANK], last=20),
        ("RUNNING", "NODE_FAIL"),
        (State.failed, "node-failed", "node local-1 is gone without a result: job 12 is NODE_FAIL"),
    ),
    "an-agent-was-killed-and-slurm-has-not-told": (
        Case([Node(), Node()], [LOST_RANK], last=20),
        ("RUNNING", "RUNNING"),
        (State.failing, "rank-lost-another", "rank 0 (stage 0, dp 0, tp 0, node local-0) failed with PeerLost"),
    ),
    "an-agent-was-killed": (
        Case([ended(1), Node()], [LOST_RANK], last=20),
        ("RUNNING", "FAILED"),
        (State.failed, "job-ended", "node local-1 is gone without a result: job 12 is FAILED"),
    ),
    "a-rank-was-killed-alone": (
        Case([ended(1), ended(1)], [KILLED, LOST_RANK], last=20),
        ("FAILED", "FAILED"),
        (State.failed, "rank-failed", "rank 2 (stage 1, dp 0, tp 0, node local-1) was killed by SIGKILL"),
    ),
    "a-job-was-cancelled-and-the-other-one-still-ends": (
        Case([Node(), ended(143, "SIGTERM")], last=20),
        ("RUNNING", "CANCELLED by 1000"),
        (State.failed, "cancelled", "node local-1 was ended from outside by SIGTERM: job 12 is CANCELLED (by 1000)"),
    ),
    "a-job-has-saved-and-the-other-one-still-does": (
        Case([Node(), ended(75, "SIGUSR2")], last=20),
        ("RUNNING", "FAILED"),
        (State.running, "running", "4 ranks at work"),
    ),
    "a-node-is-ended-and-may-be-started-again": (
        Case([Node(), ended(143, "SIGTERM")], last=20),
        ("RUNNING", "COMPLETING"),
        (State.failing, "ended-from-outside", "node local-1 was ended from outside by SIGTERM"),
    ),
}


RULES = {
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node-failed",
    "BOOT_FAIL": "node-failed",
    "OUT_OF_MEMORY": "out-of-memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "FAILED": "job-ended",
}


@pytest.mark.parametrize("state", RULES)
def test_a_job_that_took_its_node_with_it_says_why(tmp_path: Path, state: str) -> None:
    verdict = decide(seen_of(tmp_path, Case([Node(), Node()], last=20), "RUNNING", state))
    assert (verdict.state, verdict.rule) == (State.failed, RULES[state])
    assert verdict.reason.startswith(f"node local-1 is gone without a result: job 12 is {state}")


@pytest.mark.parametrize(("case", "states", "expected"), CASES.values(), ids=CASES.keys())
def test_what_happened_first_is_the_verdict(
    tmp_path: Path, case: Case, states: Sequence[str], expected: tuple[State, str, str]
) -> None:
    verdict = decide(seen_of(tmp_path, case, *states))
    state, rule, reason = expected
    assert (verdict.state, verdict.rule) == (state, rule), verdict
    assert verdict.reason.startswith(reason)


def test_that_the_run_itself_has_taken_a_job_out_of_the_queue_is_said(tmp_path: Path) -> None:
    case, states, _ = CASES["the-waiting-job-was-taken-out-of-the-queue-by-the-run-itself"]
    line = "job 12 is CANCELLED (removed from the queue by node local-0): local-1"
    assert line in decide(seen_of(tmp_path, case, *states)).evidence


def test_watching_goes_on_until_the_cause_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [
        seen_of(tmp_path / name, case, *states)
        for name, (case, states, _) in CASES.items()
        if name.startswith("a-node-was-set-down")
    ]
    left = iter(looks)
    monkeypatch.setattr("launch.commands.status.observe", lambda _run: next(left))
    folder = str(tmp_path / "a-node-was-set-down" / "run")
    assert status.main([folder, "--watch=0.01"]) == 1
    assert [line.split(": ")[1][:14] for line in capsys.readouterr().out.splitlines() if line.startswith("a-node")] == [
        "failing, rank ",
        "failed, node l",
    ]
    monkeypatch.setattr("launch.commands.status.observe", lambda _run: looks[0])
    assert status.main([folder]) == 10
