"""Runs on a real Slurm cluster to which something happens: the right verdict, and nothing left (see conftest)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf.errors import TdppError
from conf.rundir import RunDir
from launch import stop
from launch.app import main
from launch.errors import LaunchError
from launch.observe import observe
from launch.slurm_commands import job_states
from launch.verdict import State, Verdict, judge
from tests.launch.live import FOREVER, WORKER, no_data_needed
from tests.slurm.cluster import Cluster
from tests.slurm.seed import NODES, SMALL, at_work, submitted, verdict_of, wait_for

HET = pytest.mark.parametrize("het", ["jobs", "hetjob"])
MASTER, SLAVE = 0, -1
"""Of the jobs of a run, with het=jobs."""


def ids(run: RunDir) -> list[str]:
    return [job["id"] for job in run.read_json(run.jobs)["jobs"]]


def endless(tmp_path: Path, *overrides: str) -> RunDir:
    """A run at work."""
    run = submitted(tmp_path / "runs", *FOREVER, "train.log_interval=1", *overrides)
    wait_for(lambda: at_work(run))
    return run


@contextmanager
def occupied(slurm: Cluster, *options: str, seconds: int = 300) -> Iterator[str]:
    """A job of somebody else, so that some nodes are not free; its id."""
    job = slurm.run("sbatch", "--parsable", "--exclusive", "-o", "/dev/null", *options, "--wrap", f"sleep {seconds}")
    assert job.returncode == 0, job.stderr
    yield job.stdout.strip()
    slurm.run("scancel", job.stdout.strip())
    wait_for(lambda: job.stdout.strip() not in [other.id for other in slurm.jobs()])


def iterations(run: RunDir) -> list[int]:
    return [json.loads(line)["iteration"] for line in run.metrics.read_text().splitlines()]


def assert_failed(verdict: Verdict, rule: str, reason: str) -> None:
    told = "\n".join([verdict.reason, *verdict.evidence])
    assert (verdict.state, verdict.rule) == (State.failed, rule), told
    assert reason in verdict.reason, told
    assert verdict.exit_code == 1


@HET
@pytest.mark.parametrize("node_rank", [0, 2])
def test_a_node_that_fails_at_its_start_ends_the_run(slurm: Cluster, tmp_path: Path, het: str, node_rank: int) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, f"executor.het={het}", f"+cluster.environment.FAIL_START={node_rank}")
    name = ["hgx-0", "gpu2-0", "gpu2-1"][node_rank]
    assert_failed(verdict_of(run), "worker-failed", f"the worker of node {name} ended with 1")
    assert {state.state for state in job_states(ids(run)).values()} <= {"FAILED", "CANCELLED"}


@HET
def test_a_rank_that_raises_is_named(slurm: Cluster, tmp_path: Path, het: str) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, f"executor.het={het}", "+cluster.environment.FAIL_RANK=1")
    assert_failed(verdict_of(run), "rank-failed", "rank 1 (stage 1, dp 0, tp 0, node gpu2-0) failed with RuntimeError")


def test_a_killed_rank_is_named(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path)
    pid = run.read_json(run.node_ranks("gpu2-1"))[0]["pid"]
    there = ["srun", "--overlap", "--mem=0", f"--jobid={ids(run)[SLAVE]}", "--nodes=1", "--ntasks=1"]
    host = run.read_json(run.node_state("gpu2-1"))["host"]
    assert slurm.run(*there, f"--nodelist={host}", "kill", "-KILL", str(pid)).returncode == 0
    assert_failed(verdict_of(run), "rank-failed", "rank 2 (stage 2, dp 0, tp 0, node gpu2-1) was killed by SIGKILL")


def test_a_rank_that_hangs_is_told_and_stop_ends_it(slurm: Cluster, tmp_path: Path) -> None:
    run = submitted(tmp_path / "runs", *FOREVER, "train.log_interval=1", "+cluster.environment.HANG_RANK=2")
    wait_for(lambda: at_work(run))
    last = observe(run).log[-1].unix
    verdict = judge(run, last + 100)
    assert (verdict.state, verdict.rule, verdict.exit_code) == (State.stalled, "no-progress", 5)
    assert stop.main([str(run.path)]) == 0
    assert judge(run).state is State.stopped


@pytest.mark.parametrize("which", [MASTER, SLAVE], ids=["master", "slave"])
def test_cancelling_one_of_two_jobs_ends_both(slurm: Cluster, tmp_path: Path, which: int) -> None:
    run = endless(tmp_path)
    job = ids(run)[which]
    assert slurm.run("scancel", job).returncode == 0
    wait_for(lambda: not slurm.jobs())
    wait_for(lambda: judge(run).rule == "cancelled")
    assert_failed(judge(run), "cancelled", f"job {job} is CANCELLED (by {os.getuid()})")


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
        assert slurm.run("scancel", master).returncode == 0
        assert_failed(verdict_of(run), "cancelled", f"job {master} is CANCELLED")
        wait_for(lambda: slave not in [job.id for job in slurm.jobs()])


def test_a_slave_job_that_does_not_start_in_time_is_taken_out_of_the_queue(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        run = submitted(tmp_path / "runs", *FOREVER, "executor.meet_min=0.2")
        verdict = verdict_of(run, 120)
        assert verdict.state is State.failed
        assert "did not start within executor.meet_min=0.2 minutes: job" in "\n".join(
            [verdict.reason, *verdict.evidence]
        )
        assert [job.name for job in slurm.jobs()] == ["wrap"]


def test_a_slave_job_that_is_cancelled_while_it_waits_ends_the_master(slurm: Cluster, tmp_path: Path) -> None:
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        run = submitted(tmp_path / "runs", *FOREVER)
        wait_for(lambda: run.node_state("hgx-0").exists())
        slave = ids(run)[SLAVE]
        assert slurm.run("scancel", slave).returncode == 0
        assert_failed(verdict_of(run), "cancelled", f"job {slave} is CANCELLED")


@pytest.mark.parametrize(
    ("het", "node"),
    [("jobs", "hgx-001"), ("jobs", "gpu2-002"), ("hetjob", "gpu2-002")],
    ids=["master", "slave", "hetjob"],
)
def test_a_node_that_fails_starts_the_run_again_where_it_was_saved(
    slurm: Cluster, tmp_path: Path, het: str, node: str
) -> None:
    run = endless(tmp_path, f"executor.het={het}", "train.iterations=1000")
    (run.checkpoints / "latest").write_text("iter_0000990\n")
    slurm.set_node(node, "down")
    wait_for(lambda: observe(run).start.restarts == 1, 30)
    slurm.set_node(node, "resume")
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert 991 in iterations(run)
    assert {run.read_json(path)["start"] for path in run.nodes.glob("*-?.json")} == {"0.1"}


def test_a_heterogeneous_job_whose_first_node_fails_is_resumed_by_hand(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm puts only the first component back into the queue."""
    run = endless(tmp_path, "executor.het=hetjob", "train.iterations=1000")
    (run.checkpoints / "latest").write_text("iter_0000990\n")
    slurm.set_node("hgx-001", "down")
    wait_for(lambda: judge(run).state is State.failed)
    assert "waits in vain" in judge(run).reason
    slurm.set_node("hgx-001", "resume")
    wait_for(lambda: slurm.states()["hgx-001"] == "idle")
    main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed, worker=WORKER)
    assert verdict_of(run).state is State.succeeded
    assert 991 in iterations(run)


def test_at_the_time_limit_of_one_job_both_save_and_are_started_again(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "train.iterations=2000")
    slurm.set_end(ids(run)[SLAVE], 31)
    verdict = verdict_of(run, 150)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 2001))
    assert observe(run).start.restarts >= 1  # `set_end` has shortened the limit of later starts, too


def test_a_heterogeneous_job_that_gets_slurms_signal_saves_and_is_started_again(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "executor.het=hetjob", "train.iterations=600")
    assert slurm.run("scancel", "--signal=USR2", *ids(run)).returncode == 0
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 601))
    assert run.save_request("0.0").exists()


def test_a_run_that_is_preempted_saves_and_goes_on_when_it_may(slurm: Cluster, tmp_path: Path) -> None:
    groups = [f"cluster.groups.{group}.partition=scavenge" for group in ("hgx", "gpu2")]
    run = endless(tmp_path, *groups, "train.iterations=600")
    with occupied(slurm, "--partition=hgx"):
        wait_for(lambda: observe(run).start.restarts == 1, 30)
        wait_for(lambda: observe(run).saved is not None)
    verdict = verdict_of(run, 120)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 601))


def test_a_run_is_started_again_only_so_often_and_then_by_hand(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "executor.max_requeues=1", "train.iterations=1500")
    for count in (1, 2):
        for job in ids(run):
            assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
        wait_for(lambda count=count: observe(run).start.restarts == count or observe(run).over)
        wait_for(lambda: judge(run).state in (State.running, State.interrupted))
        wait_for(lambda: at_work(run, iterations(run)[-1] + 1) or observe(run).over)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.exit_code) == (State.interrupted, 8)
    assert "executor.max_requeues=1" in verdict.reason
    assert f"tdpp launch resume={run.name}" in verdict.reason
    wait_for(lambda: not slurm.jobs())
    saved = observe(run).saved
    assert saved is not None
    main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed, worker=WORKER)
    assert verdict_of(run).state is State.succeeded
    assert iterations(run) == list(range(1, 1501))


def test_a_run_that_saves_nothing_is_not_started_again(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "train.checkpoint=false")
    assert "#SBATCH --no-requeue" in (run.sbatch / "master.sh").read_text()
    for job in ids(run):
        assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
    assert_failed(verdict_of(run), "node-gave-up", "saves no checkpoints (train.checkpoint=false)")
    with pytest.raises(LaunchError, match="saves no checkpoints"):
        main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed)


@pytest.mark.parametrize("when", ["pending", "running"])
@HET
def test_stop_ends_all_jobs_of_a_run_and_no_other(slurm: Cluster, tmp_path: Path, het: str, when: str) -> None:
    with occupied(slurm, "--partition=hgx" if when == "pending" else "--nodelist=gpu2-007") as other:
        if when == "pending":
            run = submitted(tmp_path / "runs", *FOREVER, f"executor.het={het}")
        else:
            run = endless(tmp_path, f"executor.het={het}")
        assert stop.main([str(run.path)]) == 0
        assert judge(run).state is State.stopped
        assert [job.id for job in slurm.jobs()] == [other]


def test_stop_finds_jobs_of_a_submission_that_was_cut_off(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path)
    run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": []})
    assert stop.main([str(run.path)]) == 0
    assert not slurm.jobs()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["cluster.groups.gpu2.partition=moon"], "cluster.groups.gpu2: 2 nodes, partition=moon"),
        (["cluster.groups.hgx.gres=gpu:h100:8"], "cluster.groups.hgx: 1 node, partition=hgx, gres=gpu:h100:8"),
        (
            [
                "cluster.groups.gpu2.count=9",
                "parallel.node_order=hgx+gpu2*9",
                "parallel.pipeline=10",
                "parallel.partition=1-3-0-0-0-0-0-0-0-0",
            ],
            "cluster.groups.gpu2: 9 nodes",
        ),
    ],
    ids=["partition", "gres", "nodes"],
)
@HET
def test_what_slurm_would_not_take_is_told_before_anything_is_submitted(
    slurm: Cluster, tmp_path: Path, overrides: list[str], told: str, het: str
) -> None:
    with pytest.raises(TdppError) as caught:
        submitted(tmp_path / "runs", f"executor.het={het}", *overrides)
    assert told in str(caught.value)
    assert "Slurm would not take this job: " in str(caught.value)
    assert not slurm.jobs()
    assert not list((tmp_path / "runs").iterdir())


def test_a_slave_that_cannot_be_submitted_takes_the_master_back(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login node's sbatch fails the second time it submits."""
    real = slurm.run("which", "sbatch").stdout.strip()
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --test-only ] || mkdir {tmp_path}/first || {{ echo "sbatch: error: no" >&2; exit 1; }}\n'
        f'exec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="sbatch did not take the job"):
        submitted(tmp_path / "runs", *FOREVER)
    wait_for(lambda: not slurm.jobs())
    assert not list((tmp_path / "runs").iterdir())


def test_a_stop_in_the_middle_of_a_submission_leaves_no_job_behind(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the last look of the one who stops, and before the slave is submitted."""
    real = slurm.run("which", "sbatch").stdout.strip()
    between = tmp_path / "bin" / "sbatch"
    between.parent.mkdir()
    between.write_text(
        f'#!/bin/sh\n[ "$1" = --test-only ] || for run in {tmp_path}/runs/*/*/; do\n'
        f'echo \'{{"unix": 1.0}}\' > "$run/stop.json"\ndone\nexec {real} "$@"\n'
    )
    between.chmod(0o755)
    with occupied(slurm, "--partition=hgx") as other, monkeypatch.context() as path:
        path.setenv("PATH", f"{between.parent}:{os.environ['PATH']}")
        run = submitted(tmp_path / "runs", *FOREVER)
        assert [job.id for job in slurm.jobs()] == [other]
        assert judge(run).state is State.stopped


def test_inside_an_allocation_nothing_is_submitted(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(LaunchError, match="SLURM_JOB_ID=7: this shell is inside a Slurm allocation"):
        main([f"runs_dir={tmp_path}/runs", *NODES, *SMALL], preflight=no_data_needed)
    assert not (tmp_path / "runs").exists()


def test_defaults_of_the_users_shell_do_not_change_the_jobs(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SBATCH_PARTITION": "moon", "SBATCH_TIMELIMIT": "bad", "SLURM_NTASKS": "3"}.items():
        monkeypatch.setenv(name, value)
    run = submitted(tmp_path / "runs", "train.iterations=2")
    assert verdict_of(run).state is State.succeeded


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
    assert any(line.startswith("what Slurm would tell is missing: squeue ") for line in verdict.evidence)
    stop.stop(run)


def test_fifty_runs_of_two_processes_at_once_keep_apart(slurm: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    values = ",".join(str(2 + number) for number in range(25))
    alone = ["parallel.node_order=gpu2", "parallel.pipeline=1", "parallel.partition=4"]
    sweep = ["-m", f"runs_dir={runs}", *NODES, *alone, "parallel.data=1", f"train.iterations={values}"]
    children = []
    for name in ("one", "two"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = main([*sweep, f"name={name}"], preflight=no_data_needed, worker="tests.launch.stand_in_worker")
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    made = list(RunDir.all(runs))
    assert len(made) == 50
    wait_for(lambda: not slurm.jobs(), 150)
    for run in made:
        assert judge(run).state is State.succeeded
        assert iterations(run)[-1] == run.read_json(run.plan)["train"]["iterations"]
    assert len({job for run in made for job in ids(run)}) == 50


def test_a_node_that_loses_power_is_noticed_and_its_job_taken_up_by_another_node(
    slurm: Cluster, tmp_path: Path
) -> None:
    """The slave's nodes are any two of seven."""
    run = endless(tmp_path, "train.iterations=3000")
    (run.checkpoints / "latest").write_text("iter_0002990\n")
    lost = run.read_json(run.node_state("gpu2-1"))["host"]
    slurm.kill_node(lost)
    try:
        verdict = verdict_of(run, 120)
    finally:
        slurm.start_node(lost)
    assert verdict.state is State.succeeded, verdict
    assert run.read_json(run.node_state("gpu2-1"))["host"] != lost
    assert 2991 in iterations(run)


def test_a_master_that_slurm_starts_again_keeps_its_waiting_slave(slurm: Cluster, tmp_path: Path) -> None:
    """`scontrol requeue` is also what a preemption without warning looks like."""
    with occupied(slurm, "--partition=gpu2", "--nodes=7"):
        run = submitted(tmp_path / "runs", "train.iterations=5")
        wait_for(lambda: run.node_state("hgx-0").exists())
        assert slurm.run("scontrol", "requeue", ids(run)[MASTER]).returncode == 0
        wait_for(lambda: observe(run).start.restarts == 1)
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
