"""Runs on a real Slurm cluster to which something happens: the right verdict, and nothing left (see conftest)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands import stop as stop_command
from launch.control import stop
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge
from launch.machine.slurm_commands import job_states
from tests.support.cases import drawn, each
from tests.support.launch.live import FOREVER
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import (
    BOTH_WAYS,
    MASTER,
    SLAVE,
    Trainer,
    assert_failed,
    at_work,
    endless,
    ids,
    occupied,
    submitted,
    verdict_of,
    wait_for,
    without_hosts,
)


@pytest.mark.parametrize(("het", "node_rank"), each(BOTH_WAYS, [0, 2]))
def test_a_node_that_fails_at_its_start_ends_the_run(slurm: Cluster, tmp_path: Path, het: str, node_rank: int) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, f"executor.het={het}", f"+cluster.environment.FAIL_START={node_rank}")
    name = ["hgx-0", "gpu2-0", "gpu2-1"][node_rank]
    assert_failed(verdict_of(run), "worker-failed", f"the worker of node {name} exited with 1")
    assert {state.state for state in job_states(ids(run)).values()} <= {"FAILED", "CANCELLED"}


@pytest.mark.parametrize("het", drawn(BOTH_WAYS, 0, always=["hetjob"]))
def test_a_rank_that_raises_is_named(slurm: Cluster, tmp_path: Path, het: str) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, f"executor.het={het}", "+cluster.environment.FAIL_RANK=1")
    assert_failed(verdict_of(run), "rank-failed", "rank 1 (stage 1, dp 0, tp 0, node gpu2-0) failed with RuntimeError")


@pytest.mark.any_engine
def test_a_killed_rank_is_named(slurm: Cluster, tmp_path: Path, trainer: Trainer) -> None:
    run = endless(tmp_path, *trainer.words, worker=trainer.worker)
    pid = run.read_json(run.node_ranks("gpu2-1"))[0]["pid"]
    there = ["srun", "--overlap", "--mem=0", f"--jobid={ids(run)[SLAVE]}", "--nodes=1", "--ntasks=1"]
    host = run.read_json(run.node_state("gpu2-1"))["host"]
    assert slurm.run(*there, f"--nodelist={host}", "kill", "-KILL", str(pid)).returncode == 0
    assert_failed(verdict_of(run), "rank-failed", "rank 2 (stage 2, dp 0, tp 0, node gpu2-1) was killed by SIGKILL")


def test_a_rank_that_hangs_is_told_and_stop_ends_it(slurm: Cluster, tmp_path: Path) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, "train.log_interval=1", "+cluster.environment.HANG_RANK=2")
    wait_for(lambda: at_work(run) and judge(run).state not in (State.starting, State.running))
    verdict = judge(run)
    assert (verdict.state, verdict.rule, verdict.exit_code) == (State.stalled, "no-progress", 5)
    assert stop_command.main([str(run.path)]) == 0
    assert judge(run).state is State.stopped


@pytest.mark.parametrize("which", [MASTER, SLAVE], ids=["master", "slave"])
def test_cancelling_one_of_two_jobs_ends_both(slurm: Cluster, tmp_path: Path, which: int) -> None:
    run = endless(tmp_path)
    job = ids(run)[which]
    assert slurm.run("scancel", job).returncode == 0
    wait_for(lambda: not slurm.jobs())
    wait_for(lambda: judge(run).rule == "cancelled")
    assert_failed(judge(run), "cancelled", f"job {job} is CANCELLED (by {os.getuid()})")


@pytest.mark.parametrize(("het", "node"), each(BOTH_WAYS, ["hgx-001", "gpu2-002"]))
def test_a_node_that_is_set_down_under_a_run_that_saves_nothing_is_the_cause(
    slurm: Cluster, tmp_path: Path, het: str, node: str
) -> None:
    """And nothing else is, from the first moment on."""
    run = endless(tmp_path, "train.checkpoint=false", f"executor.het={het}")
    slurm.set_node(node, "down")
    told: list[Verdict] = []

    def is_known() -> bool:
        told.append(judge(run))
        return told[-1].state not in (State.running, State.failing)

    wait_for(is_known)
    assert_failed(told[-1], "node-failed", "is NODE_FAIL")
    assert_failed(verdict_of(run), "node-failed", "is NODE_FAIL")


def test_cancelling_a_heterogeneous_job_ends_it(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "executor.het=hetjob")
    assert slurm.run("scancel", *ids(run)).returncode == 0
    wait_for(lambda: not slurm.jobs())
    assert_failed(judge(run), "cancelled", "is CANCELLED")


def test_a_master_job_that_never_starts_holds_the_slave_back_and_takes_it_along(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=hgx"):
        run = submitted(tmp_path / "runs", *FOREVER)
        master, slave = ids(run)
        wait_for(lambda: judge(run).reason.count("PENDING") == 2)
        verdict = judge(run)
        assert (verdict.state, verdict.exit_code) == (State.starting, 0)
        assert f"job {slave} is PENDING (Dependency)" in verdict.reason
        assert any(line.startswith("start: Slurm does not ") for line in verdict.evidence)
        assert slurm.run("scancel", master).returncode == 0
        assert_failed(verdict_of(run), "cancelled", f"job {master} is CANCELLED")
        wait_for(lambda: slave not in [job.id for job in slurm.jobs()])


def test_a_slave_job_that_does_not_start_in_time_is_taken_out_of_the_queue(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        run = submitted(tmp_path / "runs", *FOREVER, "executor.meet_min=0.2")
        verdict = verdict_of(run)
        slave = ids(run)[SLAVE]
        late = f"did not start within 12 s (executor.meet_min): job {slave} is PENDING"
        assert_failed(verdict, "node-gave-up", late)
        assert f"job {slave} is CANCELLED (removed from the queue by node hgx-0)" in without_hosts(
            "\n".join(verdict.evidence)
        )
        assert [job.name for job in slurm.jobs()] == ["wrap"]


def test_a_slave_job_that_is_cancelled_while_it_waits_ends_the_master(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        run = submitted(tmp_path / "runs", *FOREVER)
        wait_for(lambda: run.node_state("hgx-0").exists())
        slave = ids(run)[SLAVE]
        assert slurm.run("scancel", slave).returncode == 0
        assert_failed(verdict_of(run), "cancelled", f"job {slave} is CANCELLED")


@pytest.mark.any_engine
@pytest.mark.parametrize(("het", "when"), each(BOTH_WAYS, ["pending", "running"]))
def test_stop_ends_all_jobs_of_a_run_and_no_other(
    slurm: Cluster, tmp_path: Path, trainer: Trainer, het: str, when: str
) -> None:
    words = [*trainer.words, f"executor.het={het}"]
    with occupied(slurm, "--partition=hgx" if when == "pending" else "--nodelist=gpu2-007") as other:
        if when == "pending":
            run = submitted(tmp_path / "runs", *words, *FOREVER, worker=trainer.worker)
        else:
            run = endless(tmp_path, *words, worker=trainer.worker)
            for job in slurm.run("squeue", "--noheader", "--format=%A", "--states=running").stdout.split():
                assert job == other or RunDir.find(tmp_path / "runs", job) == run  # also a component by its own id
        assert stop_command.main([str(run.path)]) == 0
        verdict = judge(run)
        assert verdict.state is State.stopped
        assert f"; continue with 'tdpp launch resume={run.name}'" in verdict.reason or when == "pending"
        assert [job.id for job in slurm.jobs()] == [other]


@pytest.mark.parametrize("name", ["plan.json", "jobs.json"])
def test_stop_ends_the_jobs_of_a_run_whose_own_files_are_damaged_and_no_other(
    slurm: Cluster, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripts of its jobs say by which comment Slurm knows them."""
    with occupied(slurm, "--nodelist=gpu2-007") as other:
        run = endless(tmp_path)
        (run.path / name).write_text("{")
        assert stop_command.main([str(run.path)]) == 0
        assert [job.id for job in slurm.jobs()] == [other]
    assert name in capsys.readouterr().out


def test_while_the_cluster_does_not_answer_the_run_s_folder_tells(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = endless(tmp_path)
    broken = tmp_path / "slurm.conf"
    broken.write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\n")
    with monkeypatch.context() as away:
        away.setenv("SLURM_CONF", str(broken))
        verdict = judge(run)
        with pytest.raises(LaunchError, match=r"squeue .*failed with 1"):
            stop.stop(run)
    assert verdict.state is State.running
    assert any(line.startswith("no answer from Slurm: squeue ") for line in verdict.evidence)
    stop.stop(run)
