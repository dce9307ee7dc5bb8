"""What a run's agents learn of its other jobs from Slurm's commands; stand-ins on PATH answer here."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.files.locks import launching
from launch.machine import slurm_commands
from launch.node import slurm_job
from launch.node.peers import JobFate
from launch.node.slurm_job import SlurmJob
from megatron_ext.contract.plan_parts import Place, RunNode

SUBMITTED = {"token": "t", "executor": "slurm", "submission": 0}
STATE = {"pid": 1, "started_unix": 0.0, "beat_unix": 0.0, "ended_unix": None, "stopped": None, "reason": None}
STATE |= {"out_begin": 0, "err_begin": 0}


def plan_of(*names: str) -> dict[str, Any]:
    """A plan of nodes with a rank each."""
    nodes = [RunNode(name, "a", "CPU", [rank], {}) for rank, name in enumerate(names)]
    ranks = [Place(rank, rank, 0, 0, rank, 0) for rank in range(len(names))]
    plan = make_plan(compose([]), "a/b")
    batch = len(names) * plan.micro_batch_size
    sizes = replace(plan, data=len(names), pipeline=1, partition=[4], global_batch_size=batch)
    return replace(sizes, nodes=nodes, ranks=ranks).as_json()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    made.write_json(made.plan, plan_of("a-0", "b-0"))
    made.write_json(made.jobs, SUBMITTED | {"jobs": [{"id": "1", "nodes": [0]}, {"id": "2", "nodes": [1]}]})
    return made


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script to be written; it has to note each call in the file `calls` of its folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "squeue"


def says(squeue: Path, script: str) -> None:
    squeue.write_text(f"#!/bin/sh\necho >> {squeue.parent}/calls\n{script}\n")
    squeue.chmod(0o755)


def calls(squeue: Path) -> int:
    return len((squeue.parent / "calls").read_text().splitlines())


def test_what_slurm_said_before_it_fell_silent_is_not_its_answer_now(run: RunDir, squeue: Path) -> None:
    job = SlurmJob(run, "1", 0, (0,), task=0)
    says(squeue, "echo '2|PENDING|Resources|5:00'")
    before = job.other("b-0", time.monotonic())
    assert before is not None
    assert before.fate is JobFate.waits
    says(squeue, "echo 'Unable to contact slurm controller' >&2; exit 1")
    since = time.monotonic()
    for _ in range(3):
        now = job.other("b-0", since)
        assert now is not None
        assert (now.fate, now.text) == (JobFate.lives, "job 2: Slurm does not answer")


_SHOWN = "JobId=1 JobName=a UserId=u(1) JobState={} Reason=None Requeue=1 PreemptEligibleTime={} PreemptTime={} End"


@pytest.mark.parametrize(
    ("shown", "saves"),
    [
        pytest.param(_SHOWN.format("RUNNING", "2026-01-01T00:00:00", "2026-01-01T00:00:09"), True, id="preempted"),
        pytest.param(_SHOWN.format("RUNNING", "2026-01-01T00:00:00", "None"), False, id="signalled by somebody"),
        pytest.param(_SHOWN.format("COMPLETING", "2026-01-01T00:00:00", "2026-01-01T00:00:09"), False, id="over"),
        pytest.param(_SHOWN.format("CANCELLED", "2026-01-01T00:00:00", "None"), False, id="cancelled"),
        pytest.param(
            _SHOWN.format("RUNNING", "Unknown", "None")
            + "\n"
            + _SHOWN.format("RUNNING", "Unknown", "2026-01-01T00:00:09"),
            True,
            id="a component of a heterogeneous job",
        ),
        pytest.param("", False, id="unknown"),
    ],
)
def test_only_before_a_preemption_there_is_time_to_save(run: RunDir, squeue: Path, shown: str, saves: bool) -> None:
    scontrol = squeue.with_name("scontrol")
    says(scontrol, f"[ \"$*\" = 'show --oneliner job 1' ] || exit 1\ncat <<'X'\n{shown}\nX")
    assert SlurmJob(run, "1", 0, (0,), task=0).may_save() is saves


def test_without_an_answer_there_is_no_time_to_save(run: RunDir, squeue: Path) -> None:
    says(squeue.with_name("scontrol"), "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert not SlurmJob(run, "1", 0, (0,), task=0).may_save()


def test_a_controller_that_does_not_answer_is_asked_no_more_often_than_another(run: RunDir, squeue: Path) -> None:
    job = SlurmJob(run, "1", 0, (0,), task=0)
    says(squeue, "exit 1")
    since = time.monotonic()
    for _ in range(3):
        job.other("b-0", since)
    assert calls(squeue) == 1


def test_nodes_that_have_ended_well_are_given_back_once(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "ASK_S", 0.0)
    scontrol = squeue.with_name("scontrol")
    says(scontrol, f'echo "$@" >> {scontrol}.said; pwd > {scontrol}.where')
    run.write_json(run.plan, plan_of("a-0", "a-1", "a-2"))
    run.nodes.mkdir()
    for node, state, code in (("a-0", "running", None), ("a-1", "ended", 0), ("a-2", "regroups", 75)):
        content = STATE | {"state": state, "exit_code": code, "job": "1", "start": "0.0"}
        run.write_json(run.node_state(node), content)
    job = SlurmJob.here(run, (0, 1, 2), 0, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"})
    says(squeue, "echo 'n[1-3]'")
    job.give_back(["a-0"])
    job.give_back(["a-0"])
    assert Path(f"{scontrol}.said").read_text() == "update JobId=1 NodeList=n1,n3\n"
    assert not Path(Path(f"{scontrol}.where").read_text().strip()).exists()  # Slurm leaves a script there


def test_the_first_node_that_trains_gives_others_back_as_long_as_slurm_takes_them(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked of Slurm where it has taken the lost first node out of the job, for it would refuse."""
    monkeypatch.setattr(slurm_job, "ASK_S", 0.0)
    scontrol = squeue.with_name("scontrol")
    says(scontrol, f'echo "$@" >> {scontrol}.said')
    names = [f"a-{number}" for number in range(6)]
    run.write_json(run.plan, plan_of(*names))
    run.nodes.mkdir()
    for node in names:
        state = {"state": "ended", "exit_code": 0} if node in ("a-2", "a-5") else {"state": "running"}
        run.write_json(run.node_state(node), STATE | {"exit_code": None} | state | {"job": "1", "start": "0.1"})
    given = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-6]"}
    for has in ("n[1-3,5-6]", "n[2-6]", "n[2,4-5]"):
        says(squeue, f"echo '{has}'")
        for task in (1, 3):
            SlurmJob.here(run, tuple(range(6)), task, given).give_back(["a-1", "a-3"])
    assert Path(f"{scontrol}.said").read_text() == "update JobId=1 NodeList=n1,n2,n5\n"
    assert capsys.readouterr().out == (
        "nodes a-2, a-5 could not be given back: Slurm takes no nodes back of a job that has lost its first one\n"
    )


def test_the_first_of_a_thousand_nodes_reads_the_jobs_once_for_all_of_them(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(squeue, "echo '2|PENDING|Resources|5:00'")
    names = ["a-0", *(f"b-{number}" for number in range(1023))]
    run.write_json(run.plan, plan_of(*names))
    job = SlurmJob(run, "1", 0, (0,), task=0)
    jobs = [{"id": "1", "nodes": [0]}, {"id": "2", "nodes": list(range(1, 1024))}]
    run.write_json(run.jobs, SUBMITTED | {"jobs": jobs})
    read = []
    monkeypatch.setattr(
        RunDir, "read_json", lambda self, path, real=RunDir.read_json: read.append(path) or real(self, path)
    )
    since = time.monotonic()
    answers = [job.other(name, since) for name in names[1:]]
    assert all(answer is not None and answer.fate is JobFate.waits for answer in answers)
    assert len(read) <= 2 + (time.monotonic() - since) / slurm_job.READ_S
    assert calls(squeue) == 1


def test_an_agent_that_waits_for_slurm_is_not_taken_for_lost(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "ANSWER_S", 0.2)
    says(squeue, "exec sleep 300")
    began = time.monotonic()
    answer = SlurmJob(run, "1", 0, (0,), task=0).other("b-0", began)
    assert answer is not None
    assert answer.fate is JobFate.lives
    assert time.monotonic() - began < 100


def test_without_the_accounting_the_queue_still_tells_what_it_knows(squeue: Path) -> None:
    says(squeue, "printf '1|RUNNING|None|5:00\\n2|CANCELLED|None|0:00\\n'")
    says(squeue.with_name("sacct"), "echo 'sacct: error: Connection refused' >&2; exit 1")
    states = slurm_commands.job_states(["1", "2"])
    assert states["1"].state == "RUNNING"
    assert str(states["2"]) == "job 2 is CANCELLED (unknown by whom, because sacct fails)"
    with pytest.raises(LaunchError, match="Connection refused"):
        slurm_commands.job_states(["1", "3"])


def test_ctrl_c_in_a_terminal_does_not_reach_slurms_commands(squeue: Path) -> None:
    says(squeue.with_name("scancel"), f"ps -o pgid= $$ > {squeue.parent}/group")
    slurm_commands.cancel(["7"])
    assert int((squeue.parent / "group").read_text()) != os.getpgid(0)


def test_other_jobs_may_have_any_comment(squeue: Path) -> None:
    says(squeue, r"printf '7|tdpp 0\n8|two\nlines\n9|\377 | tdpp 0\n10+0|tdpp 0\n10+1|tdpp 0\n'")
    assert slurm_commands.submitted("tdpp 0", os.getuid()) == ["7", "10"]


def test_only_the_jobs_of_its_own_submission_are_taken_out_of_the_queue(run: RunDir, squeue: Path) -> None:
    says(squeue.with_name("scancel"), f'echo "$@" >> {squeue.parent}/cancelled')
    SlurmJob(run, "0", 0, (0,), task=0).cancel_waiting()
    SlurmJob(run, "1", 0, (0,), task=0).cancel_waiting()
    assert (squeue.parent / "cancelled").read_text() == "--state=PENDING 2\n"


def test_the_next_task_speaks_for_a_job_whose_first_one_has_ended_well(run: RunDir, squeue: Path) -> None:
    says(squeue.with_name("scontrol"), f'echo "$@" >> {squeue.parent}/requeued')
    run.nodes.mkdir()
    second = SlurmJob(run, "1", 1, (0, 1), task=1)
    for start, state, code in (("0.0", "ended", 0), ("0.1", "running", None), ("0.1", "ended", 1)):
        run.write_json(run.node_state("a-0"), STATE | {"start": start, "job": "1", "state": state, "exit_code": code})
        second.requeue()
    assert not (squeue.parent / "requeued").exists()
    run.write_json(run.node_state("a-0"), STATE | {"start": "0.1", "job": "1", "state": "ended", "exit_code": 0})
    second.requeue()
    assert (squeue.parent / "requeued").read_text() == "requeue 1\n"


def test_a_job_that_starts_while_it_is_cancelled_is_cancelled_again(squeue: Path) -> None:
    folder = squeue.parent
    says(squeue, f"test -e {folder}/gone || printf '7|tdpp 0\\n'")
    says(
        squeue.with_name("scancel"),
        f"if test -e {folder}/once; then touch {folder}/gone; else touch {folder}/once; exit 1; fi",
    )
    slurm_commands.end("tdpp 0", os.getuid())
    assert (folder / "gone").exists()


def test_what_slurm_does_not_cancel_is_named_with_what_it_says(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "CANCEL_S", 0.8)
    says(squeue, "printf '7|tdpp 0\\n'")
    says(squeue.with_name("scancel"), "echo 'scancel: error: Kill job error on job id 7: Access denied' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"jobs 7 were cancelled, but .* in 0.8 s: scancel 7 failed .*Access denied"):
        slurm_commands.end("tdpp 0", os.getuid())


@pytest.mark.parametrize("jobs", [[], [{"id": None, "nodes": [1]}]], ids=["not-begun", "no-id"])
@pytest.mark.parametrize("own", [True, False], ids=["own-id-known", "own-id-unknown"])
def test_a_job_that_its_launch_never_submitted_is_known_never_to_come(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[dict[str, Any]], own: bool
) -> None:
    """The launch was killed; its lock is free."""
    run.write_json(run.jobs, SUBMITTED | {"jobs": [{"id": "1" if own else None, "nodes": [0]}, *jobs]})
    with launching(run):
        pass
    monkeypatch.setattr(slurm_job, "ASK_S", 0.0)
    job = SlurmJob(run, "1", 0, (0,), task=0)
    says(squeue, "echo '1|tdpp t'; echo '9|tdpp another'")
    job.other("b-0", 0.0)
    found = job.other("b-0", 0.0)
    assert found is not None
    assert found.fate is JobFate.over
    assert found.text.startswith(f"its job was never submitted, because the launch (process {os.getpid()} of ")


def test_a_job_without_an_id_is_awaited_as_long_as_it_may_come(
    run: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_json(run.jobs, SUBMITTED | {"jobs": [{"id": "1", "nodes": [0]}, {"id": None, "nodes": [1]}]})
    monkeypatch.setattr(slurm_job, "ASK_S", 0.0)
    job = SlurmJob(run, "1", 0, (0,), task=0)

    def fates() -> set[JobFate]:
        return {found.fate for found in (job.other("b-0", 0.0) for _ in range(3)) if found}

    says(squeue, "echo '1|tdpp t'")
    assert fates() == {JobFate.lives}, "whether its launch goes on cannot be seen from here, and it is young"
    with launching(run):
        pass
    says(squeue, "echo '1|tdpp t'; echo '2|tdpp t'")
    assert fates() == {JobFate.lives}, "it is in the queue, although nobody has noted that"
    says(squeue, "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert fates() == {JobFate.lives}
    says(squeue, "echo '1|tdpp t'")
    assert JobFate.over in fates()
    monkeypatch.setattr(slurm_job, "is_launching", lambda _run: True)
    assert fates() == {JobFate.lives}
