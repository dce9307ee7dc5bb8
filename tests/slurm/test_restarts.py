"""Runs that are started again on a real Slurm cluster: they go on where they were saved (see conftest)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.commands.launch import main
from launch.errors import LaunchError
from launch.history import ledger
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.node.worker_command import WORKER as ENGINE
from launch.observe.look import observe
from megatron_ext.contract.worker import SAVED
from tests.support.cases import drawn
from tests.support.launch import stand_in_checkpoint
from tests.support.launch.live import WORKER, no_data_needed
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import (
    MASTER,
    SLAVE,
    Trainer,
    assert_failed,
    at_work,
    endless,
    ids,
    iterations,
    occupied,
    submitted,
    verdict_of,
    wait_for,
)


@pytest.mark.parametrize(
    ("het", "node"),
    drawn(
        [("jobs", "hgx-001"), ("jobs", "gpu2-002"), ("hetjob", "gpu2-002")],
        0,
        always=[("jobs", "hgx-001"), ("hetjob", "gpu2-002")],
    ),
)
def test_a_node_that_fails_starts_the_run_again_where_it_was_saved(
    slurm: Cluster, tmp_path: Path, het: str, node: str
) -> None:
    run = endless(tmp_path, f"executor.het={het}", "train.iterations=1000")
    stand_in_checkpoint.save(run.read_plan(), 990)
    slurm.set_node(node, "down")
    wait_for(lambda: observe(run).start.restarts == 1)
    slurm.set_node(node, "resume")
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert 991 in iterations(run)
    assert {run.read_json(path)["start"] for path in run.nodes.glob("*-?.json")} == {"0.1"}
    (record,) = ledger.records(run.runs)
    blamed = {host.host for host in record.hosts if host.rule == "node-failed"}
    assert blamed == {node} or (het == "hetjob" and not blamed)  # which of several failed is not known once all are up


def test_a_heterogeneous_job_whose_first_node_fails_is_resumed_by_hand(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm puts only the first component back into the queue."""
    run = endless(tmp_path, "executor.het=hetjob", "train.iterations=1000")
    stand_in_checkpoint.save(run.read_plan(), 990)
    slurm.set_node("hgx-001", "down")
    # Until Slurm has put that component back, the run looks like any that has lost a node.
    wait_for(lambda: "will never start" in judge(run).reason)
    assert judge(run).state is State.failed
    slurm.resume("hgx-001")
    main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed, worker=WORKER)
    assert verdict_of(run).state is State.succeeded
    assert 991 in iterations(run)


def test_at_the_time_limit_of_one_job_both_save_and_are_started_again(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "train.iterations=2000", "executor.max_requeues=20")  # as many as a busy machine needs
    slurm.set_end(ids(run)[SLAVE], 31)
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 2001))
    assert observe(run).start.restarts >= 1  # `set_end` has shortened the limit of later starts, too


@pytest.mark.any_engine
def test_a_heterogeneous_job_that_gets_slurms_signal_saves_and_is_started_again(
    slurm: Cluster, tmp_path: Path, trainer: Trainer
) -> None:
    run = endless(tmp_path, *trainer.words, "executor.het=hetjob", "train.iterations=120", worker=trainer.worker)
    assert slurm.run("scancel", "--signal=USR2", *ids(run)).returncode == 0
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 121))
    assert run.save_request("0.0").exists()


def test_a_run_that_is_preempted_saves_and_goes_on_when_it_may(slurm: Cluster, tmp_path: Path) -> None:
    groups = [f"cluster.groups.{group}.partition=scavenge" for group in ("hgx", "gpu2")]
    run = endless(tmp_path, *groups, "train.iterations=600")
    with occupied(slurm, "--partition=hgx"):
        wait_for(lambda: observe(run).start.restarts == 1)
        wait_for(lambda: observe(run).saved is not None)
        wait_for(lambda: "(restart 1), because " in judge(run).reason)
    verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert iterations(run) == list(range(1, 601))


@contextmanager
def graceful(slurm: Cluster, seconds: int) -> Iterator[None]:
    """Slurm announces a preemption by SIGTERM alone, as where its administrator has only set GraceTime."""
    config = Path(slurm.env["SLURM_CONF"])
    text = config.read_text()
    changed = text.replace("SlurmctldParameters=preempt_send_user_signal\n", "")
    config.write_text(re.sub(r"GraceTime=\d+", f"GraceTime={seconds}", changed))
    try:
        assert slurm.run("scontrol", "reconfigure").returncode == 0
        assert "preempt_send_user_signal" not in slurm.run("scontrol", "show", "config").stdout
        yield
    finally:
        config.write_text(text)
        assert slurm.run("scontrol", "reconfigure").returncode == 0


@pytest.mark.parametrize(
    ("worker", "het"),
    [(WORKER, "jobs"), (WORKER, "hetjob"), (ENGINE, "jobs")],
    ids=["two jobs", "one job", "real ranks"],
)
def test_a_run_that_gets_sigterm_before_it_is_preempted_saves_too(
    slurm: Cluster, tmp_path: Path, training: list[str], worker: str, het: str
) -> None:
    groups = [f"cluster.groups.{group}.partition=scavenge" for group in ("hgx", "gpu2")]
    words = [*training, "train.iterations=1500"] if worker == ENGINE else ["train.iterations=600"]
    with graceful(slurm, 60):
        run = endless(tmp_path, *groups, f"executor.het={het}", *words, "train.save_interval=null", worker=worker)
        with occupied(slurm, "--partition=hgx"):
            wait_for(lambda: observe(run).start.restarts == 1)
            saved = observe(run).saved
            assert saved is not None
            assert iterations(run)[-1] - saved <= 1
            for path in run.nodes.glob("*-?.json"):
                assert run.read_json(path)["exit_code"] in (None, SAVED)
        verdict = verdict_of(run)
    assert verdict.state is State.succeeded, verdict
    assert sorted({*iterations(run)}) == list(range(1, iterations(run)[-1] + 1))


def test_a_job_that_its_user_ends_does_not_save(slurm: Cluster, tmp_path: Path) -> None:
    with graceful(slurm, 60):
        run = endless(tmp_path, "train.save_interval=null")
        assert slurm.run("scancel", *ids(run)).returncode == 0
        verdict = verdict_of(run)
    assert verdict.state in (State.stopped, State.failed), verdict
    assert observe(run).saved is None
    assert {run.read_json(path)["stopped"] for path in run.nodes.glob("*-?.json")} == {"SIGTERM"}


@pytest.mark.any_engine
def test_a_run_is_started_again_only_so_often_and_then_by_hand(
    slurm: Cluster, tmp_path: Path, trainer: Trainer
) -> None:
    words = [*trainer.words, "executor.max_requeues=1", "train.iterations=400"]
    run = endless(tmp_path, *words, worker=trainer.worker)
    for count in (1, 2):
        assert slurm.run("scancel", "--signal=USR2", *ids(run)).returncode == 0
        wait_for(lambda count=count: observe(run).start.restarts == count or observe(run).over)
        wait_for(lambda: judge(run).state in (State.running, State.interrupted))
        logged = len(iterations(run))
        wait_for(lambda logged=logged: at_work(run, logged + 1) or observe(run).over)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.exit_code) == (State.interrupted, 8)
    assert "executor.max_requeues=1" in verdict.reason
    assert f"tdpp launch resume={run.name}" in verdict.reason
    wait_for(lambda: not slurm.jobs())
    saved = observe(run).saved
    assert saved is not None
    main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed, worker=trainer.worker)
    assert verdict_of(run).state is State.succeeded
    assert iterations(run) == list(range(1, 401))


def test_a_run_that_saves_nothing_is_not_started_again(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path, "train.checkpoint=false")
    assert "#SBATCH --no-requeue" in (run.sbatch / "master.sh").read_text()
    for job in ids(run):
        assert slurm.run("scancel", "--signal=USR2", job).returncode == 0
    assert_failed(verdict_of(run), "node-gave-up", "saves no checkpoints (train.checkpoint=false)")
    with pytest.raises(LaunchError, match="saves no checkpoints"):
        main([f"resume={run.name}", f"runs_dir={run.runs}"], preflight=no_data_needed)


def test_a_node_that_loses_power_is_noticed_and_its_job_taken_up_by_another_node(
    slurm: Cluster, tmp_path: Path
) -> None:
    """The slave's nodes are any two of seven."""
    run = endless(tmp_path, "train.iterations=3000")
    stand_in_checkpoint.save(run.read_plan(), 2990)
    lost = run.read_json(run.node_state("gpu2-1"))["host"]
    slurm.kill_node(lost)
    told = []
    try:
        wait_for(lambda: told.append(judge(run)) or observe(run).start.restarts == 1)
        verdict = verdict_of(run)
    finally:
        slurm.start_node(lost)
    assert verdict.state is State.succeeded, verdict
    assert any(f"the agent of node gpu2-1 on {lost} has been silent for " in one.reason for one in told)
    assert State.stalled not in [one.state for one in told]
    wait_for(lambda: run.restarted("0.1").exists())
    assert any(
        line.startswith("restarted ") and f": {lost} failed, NODE_FAIL; start 0.1" in line
        for line in judge(run).evidence
    )
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
