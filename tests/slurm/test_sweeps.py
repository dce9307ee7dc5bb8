"""Sweeps on a real Slurm cluster: a limit that holds, what is left out, what is told, what an interruption leaves."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands import stop
from launch.commands.launch import main
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine.slurm_commands import job_states
from launch.observe.look import observe
from tests.support import PATIENCE_S
from tests.support.cases import drawn
from tests.support.launch.live import WORKER, no_data_needed, tdpp
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import NODES, SMALL, Trainer, at_work, ids, verdict_of, wait_for

ALONE = ["parallel.node_order=gpu2", "parallel.pipeline=1", "parallel.partition=4", "parallel.data=1"]
"""A run of one node."""
ANYWHERE = [f"cluster.groups.hgx.{key}" for key in ("partition=scavenge", "gres=null")]
"""A master job of one node need not wait for hgx."""


def swept(runs: Path, *overrides: str, worker: str = WORKER) -> int:
    """The exit code of a sweep of runs of one node."""
    given = [f"runs_dir={runs}", *NODES, *ALONE, "train.log_interval=1", *overrides]
    return main(["-m", *given], preflight=no_data_needed, worker=worker)


def made(runs: Path) -> list[RunDir]:
    """In the order of submission."""
    return sorted(RunDir.all(runs), key=lambda run: int(ids(run)[0]))


def most_at_once(runs: list[RunDir]) -> int:
    """By what the nodes have told of their begin and end."""
    changes = []
    for run in runs:
        states = [run.read_json(path) for path in run.nodes.glob("*-?.json")]
        changes.append((min(state["started_unix"] for state in states), 1))
        changes.append((max(state["ended_unix"] for state in states), -1))
    running = [0]
    for _, change in sorted(changes):
        running.append(running[-1] + change)
    return max(running)


LAYOUTS = {"job": ALONE, "jobs": [*SMALL, *ANYWHERE], "hetjob": [*SMALL, *ANYWHERE, "executor.het=hetjob"]}


@pytest.mark.parametrize("layout", drawn(LAYOUTS, 0, always=["jobs", "hetjob"]))
def test_no_more_runs_than_max_jobs_run_at_once_and_nobody_waits_for_them(
    slurm: Cluster, tmp_path: Path, layout: str
) -> None:
    runs = tmp_path / "runs"
    assert swept(runs, *LAYOUTS[layout], "max_jobs=2", "train.iterations=200,201,202,203,204") == 0
    submitted = made(runs)
    assert len(submitted) == 5
    assert judge(submitted[-1]).state is State.starting
    for run in submitted:
        assert verdict_of(run).state is State.succeeded
    assert most_at_once(submitted) == 2


def test_without_a_limit_they_all_run_at_once(slurm: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert swept(runs, "train.iterations=200,201,202") == 0
    for run in made(runs):
        assert verdict_of(run).state is State.succeeded
    assert most_at_once(made(runs)) == 3


@pytest.mark.any_engine
def test_a_run_that_is_started_again_or_taken_out_of_the_queue_lets_no_other_pass(
    slurm: Cluster, tmp_path: Path, trainer: Trainer
) -> None:
    runs = tmp_path / "runs"
    assert swept(runs, *trainer.words, "max_jobs=1", "train.iterations=120,121,122", worker=trainer.worker) == 0
    first, second, third = made(runs)
    wait_for(lambda: at_work(first))
    assert stop.main([str(second.path)]) == 0
    assert slurm.run("scancel", "--signal=USR2", *ids(first)).returncode == 0
    wait_for(lambda: observe(first).start.restarts == 1)
    assert {state.state for state in job_states(ids(third)).values()} == {"PENDING"}
    for run, state in ((first, State.succeeded), (second, State.stopped), (third, State.succeeded)):
        assert verdict_of(run).state is state
    restarted = first.read_json(first.node_state("gpu2-0"))
    assert third.read_json(third.node_state("gpu2-0"))["started_unix"] > restarted["ended_unix"]
    assert restarted["start"] == "0.1"


def test_what_succeeded_or_waits_or_runs_is_left_out_and_what_was_stopped_is_not(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert swept(runs, "max_jobs=1", "train.iterations=3,100000,100001,100002") == 0
    short, running, waiting, stopped = made(runs)
    assert verdict_of(short).state is State.succeeded
    wait_for(lambda: at_work(running))
    assert stop.main([str(stopped.path)]) == 0
    capfd.readouterr()
    assert swept(runs, "train.iterations=3,100000,100001,100002", "skip_existing=true", "executor.save_s=99") == 0
    rows = [row.split() for row in capfd.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows[:3]] == [short.name, running.name, waiting.name]
    assert [row[row.index("(skipped)") - 1] for row in rows[:3]] == ["succeeded", "running", "starting"]
    assert rows[3][0] != stopped.name
    assert len(made(runs)) == 5
    for run in (waiting, running, made(runs)[-1]):
        assert stop.main([str(run.path)]) == 0


def test_what_slurm_refuses_is_told_at_the_end_and_the_others_run(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    partitions = "cluster.groups.gpu2.partition=gpu2,moon,scavenge"
    assert swept(runs, partitions, "max_jobs=1", "train.iterations=3", "parallel.global_batch_size=4,5") == 1
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tdpp: error")]
    assert len(told) == 2
    assert (
        len([line for line in told if "3 of 6 combinations, such as " in line and "=5 is not divisible" in line]) == 1
    )
    assert len([line for line in told if "partition=moon" in line and "Slurm would refuse this job" in line]) == 1
    assert any("; Invalid partition name specified; sinfo lists the partitions" in line for line in told)
    assert len(made(runs)) == 2
    for run in made(runs):
        assert verdict_of(run).state is State.succeeded
    assert most_at_once(made(runs)) == 1


def test_too_many_gpu_hours_are_told_and_nothing_is_submitted(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seed = ["-m", "experiment=seed_a100x1_a10x7", "container=none", f"runs_dir={tmp_path}/runs"]
    limits = [f"cluster.groups.{group}.time_min=1440" for group in ("hgx", "gpu2")]
    with pytest.raises(LaunchError, match=r"1,536 GPU-hours exceed confirm_gpu_hours=1000: .*yes=true"):
        main([*seed, *limits, "parallel.micro_batch_size=1,2"], preflight=no_data_needed, worker=WORKER)
    assert "2 runs of up to 1,536 GPU-hours" in capfd.readouterr().err
    assert not slurm.jobs()
    assert not (tmp_path / "runs").exists()


def test_the_runs_of_a_packed_sweep_train_at_once_on_nodes_of_their_own(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    plans = ["parallel.global_batch_size=4", "parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b"]
    given = [f"runs_dir={runs}", *NODES, *plans, "parallel.tensor=1", "train.log_interval=1"]
    lengths = "train.iterations=400,401,402,403"
    assert main(["-m", *given, lengths, "pack=true"], preflight=no_data_needed, worker=WORKER) == 0
    told = capfd.readouterr()
    assert "pack=true: by the prediction the last of 4 runs has trained after " in told.err
    started = made(runs)
    assert len(started) == 4
    for run in started:
        assert verdict_of(run).state is State.succeeded
    assert most_at_once(started) > 1
    at_work = [
        (state["started_unix"], state["ended_unix"], state["host"])
        for run in started
        for state in (run.read_json(path) for path in run.nodes.glob("*-?.json"))
    ]
    for number, (begun, ended, host) in enumerate(at_work):
        assert not [one for one in at_work[:number] if one[2] == host and one[0] < ended and begun < one[1]]
    (sweep,) = (runs / "sweeps").iterdir()
    assert main([f"resume={sweep}"], preflight=no_data_needed, worker=WORKER) == 0
    assert len(made(runs)) == 4
    assert capfd.readouterr().out.count("(skipped)") == 4


def test_what_failed_or_is_missing_of_a_packed_sweep_is_started_with_its_plan(
    slurm: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run was ended before it had saved, the folder of another is gone; both get the plans of before."""
    runs = tmp_path / "runs"
    plans = ["parallel.global_batch_size=4", "parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b"]
    given = [f"runs_dir={runs}", *NODES, *plans, "parallel.tensor=1", "train.log_interval=1"]
    lengths = "train.iterations=100,101,102"
    assert main(["-m", *given, lengths, "pack=true"], preflight=no_data_needed, worker=WORKER) == 0
    (sweep,) = (runs / "sweeps").iterdir()
    ended, gone, whole = before = made(runs)
    assert slurm.run("scancel", *ids(ended)).returncode == 0
    planned = {one.train.iterations: (one.partition, one.pipeline, one.nodes) for one in map(RunDir.read_plan, before)}
    for run in (gone, whole):
        assert verdict_of(run).state is State.succeeded
    assert verdict_of(ended).state is not State.succeeded
    shutil.rmtree(gone.path)
    capfd.readouterr()
    assert main([f"resume={sweep}"], preflight=no_data_needed, worker=WORKER) == 0
    assert capfd.readouterr().out.count("(skipped)") == 1
    again = [run for run in made(runs) if run.path not in (ended.path, whole.path)]
    assert len(again) == 2
    for run in again:
        assert verdict_of(run).state is State.succeeded
    found = {one.train.iterations: (one.partition, one.pipeline, one.nodes) for one in map(RunDir.read_plan, again)}
    assert found == {length: planned[length] for length in found}
    assert len(found) == 2


def test_an_interrupted_sweep_has_submitted_whole_runs_and_tells_of_each(slurm: Cluster, tmp_path: Path) -> None:
    values = ",".join(str(100000 + number) for number in range(30))
    given = ["runs_dir=runs", *NODES, *SMALL, f"train.iterations={values}"]
    sweeping = tdpp("launch", "-m", *given, cwd=tmp_path)
    runs = tmp_path / "runs"
    wait_for(lambda: len(list(RunDir.all(runs))) > 3)  # the last one may not have been submitted, and is taken back
    os.killpg(sweeping.pid, signal.SIGINT)  # as a terminal does
    out, err = sweeping.communicate(timeout=PATIENCE_S)
    assert sweeping.returncode == 130, err
    names = {row.split()[0] for row in out.splitlines()[1:]}
    assert names == {run.name for run in RunDir.all(runs)}
    assert 3 <= len(names) < 30
    assert sorted(job.id for job in slurm.jobs()) == sorted(job for run in made(runs) for job in ids(run))
    assert all(len(ids(run)) == 2 for run in made(runs))
    assert "combinations not started" in err
    slurm.cancel_all()
    wait_for(lambda: not slurm.jobs())


def test_a_sweep_of_sixteen_submits_every_run(slurm: Cluster, tmp_path: Path) -> None:
    assert swept(tmp_path / "runs", "train.iterations=" + ",".join(str(2 + n) for n in range(16)), "max_jobs=4") == 0
    assert len(made(tmp_path / "runs")) == 16
    slurm.cancel_all()
    wait_for(lambda: not slurm.jobs())
