"""Jobs that a real Slurm cluster takes, refuses, or gets only in part; others stay as they are (see conftest)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from conf.errors import TdppError
from conf.run_folder.rundir import RunDir
from launch.commands import search
from launch.commands import stop as stop_command
from launch.commands.launch import main
from launch.control.submit import resume
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine.slurm_commands import hosts_of
from launch.observe.look import observe
from tests.support.cases import each
from tests.support.launch.live import FOREVER, WORKER, no_data_needed
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import (
    BOTH_WAYS,
    NODES,
    SMALL,
    at_work,
    endless,
    ids,
    iterations,
    occupied,
    submitted,
    verdict_of,
    wait_for,
)


def before_it_submits(slurm: Cluster, does: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From now on sbatch, which then lies in `folder`, does this in a shell before it submits a job."""
    sbatch, real = folder / "sbatch", slurm.run("which", "sbatch").stdout.strip()
    folder.mkdir()
    sbatch.write_text(f'#!/bin/sh\n[ "$1" = --test-only ] || {does}\nexec {real} "$@"\n')
    sbatch.chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_stop_finds_jobs_of_a_submission_that_was_cut_off(slurm: Cluster, tmp_path: Path) -> None:
    run = endless(tmp_path)
    run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": []})
    assert stop_command.main([str(run.path)]) == 0
    assert not slurm.jobs()


def test_the_end_of_a_run_is_told_by_its_nodes_and_by_slurms_mail(slurm: Cluster, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = f"notify.command=\"sh -c 'echo $TDPP_STATE >> {told}'\""
    run = submitted(tmp_path / "runs", "notify.mail=me@example.org", command, *FOREVER)
    first, second = (slurm.run("scontrol", "show", "job", job).stdout for job in ids(run))
    assert "MailUser=me@example.org" in first
    assert "END,FAIL" in first
    assert "me@example.org" not in second
    wait_for(lambda: at_work(run))
    assert stop_command.main([str(run.path)]) == 0
    wait_for(lambda: told.exists() and told.read_text())
    assert told.read_text() == "stopped\n"


def test_more_options_reach_slurm_and_jobs_with_a_comment_are_still_found(slurm: Cluster, tmp_path: Path) -> None:
    run = submitted(
        *(tmp_path / "runs", *FOREVER, "+cluster.sbatch={comment: for the lab, nice: '7'}"),
        *("cluster.exclude=['gpu2-[001-002]',gpu2-004]", "+cluster.groups.hgx.sbatch={nice: null, exclusive: ''}"),
    )
    hgx, gpu2 = (slurm.run("scontrol", "show", "job", job).stdout for job in ids(run))
    assert "Comment=for the lab tdpp" in hgx
    assert "Nice=0" in hgx and "Nice=7" in gpu2
    wait_for(lambda: at_work(run))
    assert not {"gpu2-001", "gpu2-002", "gpu2-004"} & set(hosts_of(ids(run)[1]))
    run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": []})
    assert stop_command.main([str(run.path)]) == 0
    assert not slurm.jobs()


def test_a_run_after_another_starts_when_that_has_succeeded_or_not_at_all(slurm: Cluster, tmp_path: Path) -> None:
    runs, paused = tmp_path / "runs", ["train.iterations=3", "train.log_interval=1"]
    first = submitted(runs, *FOREVER, "name=first")
    second = submitted(runs, *paused, "name=second", "executor.after=latest")
    third = submitted(runs, *paused, "name=third", "executor.after=second")
    assert f"--dependency=afterok:{':'.join(ids(first))}\n" in (second.sbatch / "master.sh").read_text()
    wait_for(lambda: at_work(first))
    assert judge(third).state is State.starting
    assert stop_command.main([str(first.path)]) == 0
    for run in (second, third):
        assert verdict_of(run).state is State.failed
        assert "executor.after" in verdict_of(run).reason
    with pytest.raises(LaunchError, match=r"executor\.after=second/.*: second/.* has ended: failed, .*resume it"):
        submitted(runs, *paused, "name=fourth", "executor.after=second")
    good = submitted(runs, *paused, "name=good")
    last = submitted(runs, *paused, "name=good", "executor.after=good")
    assert last.read_json(last.jobs)["after"] == good.name
    assert verdict_of(good).state is State.succeeded
    assert verdict_of(last).state is State.succeeded
    started = slurm.run("sacct", "-X", "-n", "-o", "start,end", "-j", ",".join([*ids(good), *ids(last)])).stdout
    ends_before, starts = started.split()[1:4:2], started.split()[4::2]
    assert max(ends_before) <= min(starts)
    assert verdict_of(submitted(runs, *paused, "name=again", "executor.after=good")).state is State.succeeded


REFUSED = {
    "partition": (["cluster.groups.gpu2.partition=moon"], "cluster.groups.gpu2: 2 nodes, partition=moon"),
    "gres": (
        ["cluster.groups.hgx.gres=gpu:h100:8"],
        "cluster.groups.hgx: 1 node, partition=hgx, gres=gpu:h100:8",
    ),
    "nodes": (
        [
            "cluster.groups.gpu2.count=9",
            "parallel.node_order=hgx+gpu2*9",
            "parallel.pipeline=10",
            "parallel.partition=1-3-0-0-0-0-0-0-0-0",
        ],
        "gpu2: 7 of 7 usable, and 9 nodes needed: there are no more such nodes; go on with cluster.groups.gpu2.count=7",
    ),
}


@pytest.mark.parametrize(("het", "why"), each(BOTH_WAYS, [*REFUSED]))
def test_what_slurm_would_not_take_is_told_before_anything_is_submitted(
    slurm: Cluster, tmp_path: Path, het: str, why: str
) -> None:
    overrides, told = REFUSED[why]
    with pytest.raises(TdppError) as caught:
        submitted(tmp_path / "runs", f"executor.het={het}", *overrides)
    assert told in str(caught.value)
    assert ("Slurm would refuse this job: " in str(caught.value)) == (why != "nodes")
    assert not slurm.jobs()
    assert not list((tmp_path / "runs").iterdir())


ALL_OF_GPU2 = [
    "parallel.node_order=gpu2*7",
    "parallel.pipeline=1",
    "parallel.partition=null",
    "parallel.data=7",
    "parallel.global_batch_size=7",
]


def test_nodes_that_are_down_are_named_with_a_way_out_before_anything_is_submitted(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.set_node("gpu2-002", "down")
    slurm.set_node("gpu2-005", "drain")
    missing = "gpu2: 5 of 7 usable, gpu2-002 is down, gpu2-005 is drained"
    with pytest.raises(TdppError) as caught:
        submitted(tmp_path / "runs", *ALL_OF_GPU2)
    assert f"{missing}, and 7 nodes needed: wait for them ('sinfo -R' says more), or go on with" in str(caught.value)
    assert "cluster.groups.gpu2.count=5" in str(caught.value)
    assert search.main([*NODES, "top=1", "model=tiny", "parallel.global_batch_size=8"]) == 0
    assert (
        f"({missing}; the plans count 7: cluster.groups.gpu2.count=5 leaves out the others)" in capsys.readouterr().err
    )
    assert not slurm.jobs()
    run = submitted(tmp_path / "runs", *FOREVER)  # two of them are enough
    assert stop_command.main([str(run.path)]) == 0


def test_a_slurm_that_does_not_answer_is_not_taken_for_one_that_refuses(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "slurm.conf"
    text = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", Path(os.environ["SLURM_CONF"]).read_text())
    silent.write_text(text.replace("MessageTimeout=4", "MessageTimeout=2"))
    for name in ("gres.conf", "plugstack.conf"):
        shutil.copy(Path(os.environ["SLURM_CONF"]).parent / name, tmp_path / name)
    with monkeypatch.context() as away:
        away.setenv("SLURM_CONF", str(silent))
        with pytest.raises(TdppError) as caught:
            submitted(tmp_path / "runs")
        assert search.main([*NODES, "top=1", "model=tiny", "parallel.global_batch_size=8"]) == 0
    assert "Slurm does not answer, so nothing was submitted: Unable to contact slurm controller" in str(caught.value)
    assert "refuse" not in str(caught.value)
    assert "Slurm does not answer (Unable to contact slurm controller" in capsys.readouterr().err


def test_a_slave_that_cannot_be_submitted_takes_the_master_back(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login node's sbatch fails the second time it submits."""
    once = f'mkdir {tmp_path}/first || {{ echo "sbatch: error: no" >&2; exit 1; }}'
    before_it_submits(slurm, once, tmp_path / "bin", monkeypatch)
    with pytest.raises(LaunchError, match="sbatch refused the job"):
        submitted(tmp_path / "runs", *FOREVER)
    wait_for(lambda: not slurm.jobs())
    assert not list((tmp_path / "runs").iterdir())


def test_a_stop_in_the_middle_of_a_submission_leaves_no_job_behind(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the last look of the one who stops, and before the slave is submitted."""
    asked = f'for run in {tmp_path}/runs/*/*/; do echo \'{{"unix": 1.0}}\' > "$run/stop.json"; done'
    with occupied(slurm, "--partition=hgx") as other, monkeypatch.context() as patch:
        before_it_submits(slurm, asked, tmp_path / "bin", patch)
        run = submitted(tmp_path / "runs", *FOREVER)
        assert [job.id for job in slurm.jobs()] == [other]
        assert judge(run).state is State.stopped


def cut_off(slurm: Cluster, kill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose launch was killed by `kill`, at the slave's sbatch."""
    with monkeypatch.context() as patch:
        before_it_submits(slurm, kill, tmp_path / "bin", patch)
        launcher = os.fork()
        if launcher == 0:
            submitted(tmp_path / "runs", *FOREVER)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == -signal.SIGKILL
    return RunDir.find(tmp_path / "runs", None)


def test_a_launch_that_is_killed_while_it_submits_goes_on_and_is_settled_by_stop(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the slave's sbatch is on its way; nobody writes down what it says."""
    kill = f"mkdir {tmp_path}/first || kill -9 $PPID"
    run = cut_off(slurm, kill, tmp_path, monkeypatch)
    master, slave = run.read_json(run.jobs)["jobs"]
    assert slave["id"] is None
    wait_for(lambda: len(slurm.jobs()) == 2)
    assert next(job.id for job in observe(run).jobs) == master["id"]
    wait_for(lambda: judge(run).state is State.running)
    assert stop_command.main([str(run.path)]) == 0
    assert not slurm.jobs()
    assert judge(run).state is State.stopped


@pytest.mark.slow
def test_a_master_whose_slave_was_never_submitted_ends_and_is_resumed(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launch is killed before the slave's sbatch; nothing was saved, and nothing is requeued."""
    kill = f"mkdir {tmp_path}/first || {{ kill -9 $PPID; exit 1; }}"
    run = cut_off(slurm, kill, tmp_path, monkeypatch)
    begun = time.monotonic()
    wait_for(lambda: not slurm.jobs())
    assert time.monotonic() - begun < 180, "executor.meet_min is 10 minutes"
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.lost, "launch-cut-off"), verdict
    state = run.read_json(run.node_state("hgx-0"))
    assert (state["start"], state["state"]) == ("0.0", "ended"), "it was not started again"
    assert "its job was never submitted, because the launch (process " in state["reason"]
    resume(run, WORKER)
    wait_for(lambda: judge(run).state is State.running)
    assert stop_command.main([str(run.path)]) == 0


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


def test_runs_of_two_processes_at_once_keep_apart(slurm: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    values = ",".join(str(2 + number) for number in range(3))
    alone = ["parallel.node_order=gpu2", "parallel.pipeline=1", "parallel.partition=4"]
    sweep = ["-m", f"runs_dir={runs}", *NODES, *alone, "parallel.data=1", f"train.iterations={values}"]
    children = []
    for name in ("one", "two"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = main(
                    [*sweep, f"name={name}"], preflight=no_data_needed, worker="tests.support.launch.stand_in_worker"
                )
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    made = list(RunDir.all(runs))
    assert len(made) == 6
    wait_for(lambda: not slurm.jobs())
    for run in made:
        assert judge(run).state is State.succeeded
        assert iterations(run)[-1] == run.read_json(run.plan)["train"]["iterations"]
    assert len({job for run in made for job in ids(run)}) == 6
