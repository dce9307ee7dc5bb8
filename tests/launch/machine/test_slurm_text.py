"""What is given to Slurm, and what is read from it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from conf.compose import compose
from launch.control.executors.sbatch import JobRequest, Submission, job_requests, sbatch_text
from launch.errors import LaunchError
from launch.files.records import Start
from launch.machine.job_states import JobState, parse_sacct, parse_squeue
from launch.machine.slurm_commands import environment
from tests.support import ROOT

GOLDEN = ROOT / "tests" / "launch" / "golden" / "sbatch"
SUBMISSION = Submission(
    name="xl",
    comment="tdpp 0123",
    python="/opt/venv/bin/python",
    folder=Path("/shared/runs/xl/1/submitit"),
    path="/opt/tdpp",
    save_s=120,
    requeue=True,
)
MIXED = ["experiment=seed_a100x1_a10x7", "container=none"]
DETAILS = [
    *("cluster.groups.hgx.account=physics", "cluster.groups.hgx.qos=high", "cluster.groups.hgx.mem=0"),
    *("cluster.groups.gpu2.cpus_per_task=16", "cluster.groups.gpu2.constraint='a10&ib'"),
    *("cluster.groups.gpu2.time_min=90", "cluster.groups.hgx.cpus_per_task=32"),
]


def requests(*overrides: str) -> dict[str, JobRequest]:
    return {request.role: request for request in job_requests(compose(overrides))}


@pytest.mark.parametrize(
    ("golden", "overrides", "role", "after"),
    [
        pytest.param("homogeneous", ["experiment=seed_a10x8", "container=none"], "job", None, id="homogeneous"),
        pytest.param("master", [*MIXED, *DETAILS], "master", None, id="master"),
        pytest.param("slave", [*MIXED, *DETAILS], "slave", "41", id="slave"),
        pytest.param("hetjob", [*MIXED, *DETAILS, "executor=slurm_hetjob"], "job", None, id="hetjob"),
    ],
)
def test_a_script_is_as_it_was(golden: str, overrides: list[str], role: str, after: str | None) -> None:
    assert sbatch_text(SUBMISSION, requests(*overrides)[role], after) == (GOLDEN / f"{golden}.sh").read_text()


def test_a_run_that_saves_nothing_is_never_requeued() -> None:
    text = sbatch_text(replace(SUBMISSION, requeue=False), requests("executor=slurm")["job"], None)
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue" not in text


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param("0 0 0", 0, id="well"),
        pytest.param("0 233 137", 0, id="without a node that died before and an agent that was killed"),
        pytest.param("0 1 0", 1, id="an agent found an error"),
        pytest.param("137 233 233", 1, id="nothing is left"),
    ],
)
def test_an_elastic_job_has_a_step_on_each_node_and_fails_by_its_agents(tmp_path: Path, ends: str, code: int) -> None:
    programs = {
        "srun": f'a=({ends}); for last; do :; done; echo "$last $*" >>"{tmp_path}/steps"; exit "${{a[$last]}}"',
        "scontrol": 'case "$*" in "show hostnames gpu[1-3]") printf "gpu1 gpu2 gpu3";;'
        ' "show job"*) echo JOB_GRES=gpu:1;; *) exit 1;; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    submission = replace(SUBMISSION, folder=tmp_path, requeue=False, keep=True)
    text = sbatch_text(submission, requests("executor=slurm")["job"], None)
    assert "#SBATCH --no-kill\n" in text
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-3]"}
    assert subprocess.run(["bash"], input=text, text=True, env=given, check=False).returncode == code
    steps = sorted((tmp_path / "steps").read_text().splitlines())
    assert [step.split()[0] for step in steps] == ["0", "1", "2"]
    for number, step in enumerate(steps, start=1):
        assert f" --no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --nodelist=gpu{number} bash -c " in step


def test_an_elastic_job_cannot_count_the_gpus_of_all_its_nodes() -> None:
    request = requests("executor=slurm", "+cluster.sbatch={gpus: 8}")["job"]
    with pytest.raises(LaunchError, match=r"sbatch\.gpus counts the GPUs of a whole job.*gpus-per-node"):
        sbatch_text(replace(SUBMISSION, keep=True), request, None)


@pytest.mark.parametrize("folder", ["/a\ntouch /tmp/x/submitit", "/a\r/submitit"])
def test_no_line_of_a_script_comes_from_a_path_or_a_value(folder: str) -> None:
    with pytest.raises(LaunchError, match="contains a line break"):
        sbatch_text(replace(SUBMISSION, folder=Path(folder)), requests("executor=slurm")["job"], None)


@pytest.mark.parametrize("name", ["a b", "it's", '"q"', "$(touch x) `y` #", "한글", "-lead", "a\\\\b"])
def test_a_shell_reads_the_agents_command_as_it_was_meant(tmp_path: Path, name: str) -> None:
    """srun is replaced by a program that runs its command, as srun does, without a shell in between."""
    folder = tmp_path / name
    folder.mkdir()
    srun = tmp_path / "srun"
    srun.write_text(f"#!{sys.executable}\nimport os, sys\nos.execvp(sys.argv[2], sys.argv[2:])\n")
    srun.chmod(0o755)
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    submission = replace(SUBMISSION, folder=folder, python=str(python), name=name)
    text = sbatch_text(submission, requests("executor=slurm")["job"], None)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "2"}
    subprocess.run(["bash"], input=text, text=True, env=given, check=True)
    assert (folder / "7_2_log.out").read_text() == f"-P\n-u\n-m\nlaunch.start_agent\n{folder}\nagent-0-job.json\n"
    assert f"--job-name={shlex.quote(name)}\n" in text


def test_percent_signs_of_a_path_are_not_slurms() -> None:
    text = sbatch_text(replace(SUBMISSION, folder=Path("/a%x/submitit")), requests("executor=slurm")["job"], None)
    assert "#SBATCH --output=/a%%x/submitit/%j_batch.out\n" in text


def test_more_options_stand_in_the_script_and_a_comment_before_tdpps_own() -> None:
    given = "+cluster.sbatch={exclusive: '', comment: 'for the lab', reservation: a b}"
    text = sbatch_text(SUBMISSION, requests("executor=slurm", given, "cluster.exclude=[n1,n2]")["job"], None)
    assert "#SBATCH --comment='for the lab tdpp 0123'\n" in text
    assert "#SBATCH --exclude=n1,n2\n#SBATCH --exclusive\n" in text
    assert "#SBATCH --reservation='a b'\n" in text


def test_a_job_waits_for_those_of_its_lane_and_of_the_run_before() -> None:
    text = sbatch_text(replace(SUBMISSION, behind=("7", "8"), after=("3",)), requests("executor=slurm")["job"], None)
    assert "#SBATCH --dependency=afterany:7:8,afterok:3\n" in text
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in text


def test_each_group_of_nodes_is_a_job_and_the_master_has_node_0() -> None:
    found = job_requests(compose([*MIXED, "parallel.node_order=gpu2*3+hgx+gpu2*4"]))
    assert [(request.role, request.nodes) for request in found] == [("master", (0, 1, 2, 4, 5, 6, 7)), ("slave", (3,))]


def test_the_tasks_of_a_heterogeneous_job_go_through_its_components() -> None:
    (found,) = job_requests(compose([*MIXED, "parallel.node_order=gpu2*3+hgx+gpu2*4", "executor=slurm_hetjob"]))
    assert found.nodes == (0, 1, 2, 4, 5, 6, 7, 3)


START = 1_800_000_000.0


def at(seconds: float) -> str:
    """So many seconds after `START`, as Slurm writes it here."""
    return datetime.fromtimestamp(START + seconds).isoformat(timespec="seconds")


def test_a_shells_slurm_settings_reach_no_job_but_the_cluster_does() -> None:
    inherited = {"SLURM_CONF": "c", "SLURM_NTASKS": "3", "SBATCH_PARTITION": "p", "PMIX_RANK": "0", "PMI_ID": "1"}
    inherited |= {"SQUEUE_PARTITION": "p", "SCANCEL_INTERACTIVE": "1", "SACCT_FEDERATION": "1", "SCONTROL_ALL": "1"}
    assert environment({**inherited, "HOME": "/", "PMIC": "x"}) == {"SLURM_CONF": "c", "HOME": "/", "PMIC": "x"}


@pytest.mark.parametrize(
    ("text", "states"),
    [
        pytest.param("", {}, id="nothing"),
        pytest.param(
            "12|PENDING|Resources|10:00\n13|RUNNING|None|9:59\n",
            {
                "12": JobState(id="12", state="PENDING", detail="Resources", time_left="10:00"),
                "13": JobState(id="13", state="RUNNING", time_left="9:59"),
            },
            id="two-jobs",
        ),
        pytest.param(
            "12|FAILED|NonZeroExitCode|0:00\n",
            {"12": JobState(id="12", state="FAILED", time_left="0:00")},
            id="a-reason-only-while-pending",
        ),
        pytest.param(
            "12+1|PENDING|None|10:00\n12+0|RUNNING|None|9:59\n",
            {"12": JobState(id="12+1", state="PENDING", time_left="10:00")},
            id="heterogeneous-lives-while-a-part-does",
        ),
        pytest.param(
            "12+0|COMPLETED|None|0:00\n12+1|NODE_FAIL|None|0:00\n",
            {"12": JobState(id="12+1", state="NODE_FAIL", time_left="0:00")},
            id="heterogeneous-ends-as-its-worst-part",
        ),
        pytest.param(
            "12+1|FAILED|None|0:00\n12+0|PENDING|Resources|0:00\n",
            {
                "12": JobState(
                    id="12+1", state="FAILED", detail="so the rest of the heterogeneous job, 12+0, will never start"
                )
            },
            id="heterogeneous-cannot-be-whole-again",
        ),
        pytest.param(
            "12+1|FAILED|None|0:00\n12+0|PENDING|BeginTime|0:00\n",
            {"12": JobState(id="12+0", state="PENDING", detail="BeginTime", time_left="0:00")},
            id="heterogeneous-on-its-way-back",
        ),
        pytest.param(
            f"12|PENDING|Resources|10:00||{at(30)}\n13|RUNNING|None|9:59|a1|{at(0)}\n14|PENDING|None|9:00||N/A\n",
            {
                "12": JobState(id="12", state="PENDING", detail="Resources", time_left="10:00", start_unix=START + 30),
                "13": JobState(id="13", state="RUNNING", time_left="9:59", hosts=("a1",)),
                "14": JobState(id="14", state="PENDING", time_left="9:00"),
            },
            id="expected-starts",
        ),
        pytest.param(
            f"12+0|PENDING|None|9:00||{at(90)}\n12+1|PENDING|None|9:00||{at(30)}\n"
            f"13+0|PENDING|None|9:00||{at(90)}\n13+1|PENDING|None|9:00||N/A\n",
            {
                "12": JobState(id="12+0", state="PENDING", time_left="9:00", start_unix=START + 90),
                "13": JobState(id="13+0", state="PENDING", time_left="9:00"),
            },
            id="heterogeneous-starts-as-a-whole",
        ),
    ],
)
def test_squeue_is_read(text: str, states: dict[str, JobState]) -> None:
    assert parse_squeue(text) == states


@pytest.mark.parametrize(
    ("text", "states"),
    [
        pytest.param("7|COMPLETED\n", {"7": JobState(id="7", state="COMPLETED")}, id="completed"),
        pytest.param("7|CANCELLED by 1000\n", {"7": JobState(id="7", state="CANCELLED", detail="by 1000")}, id="by"),
        pytest.param("7|CANCELLED+\n", {"7": JobState(id="7", state="CANCELLED")}, id="cut-off-by-sacct"),
        pytest.param("7+0|COMPLETED\n7+1|TIMEOUT\n", {"7": JobState(id="7+1", state="TIMEOUT")}, id="heterogeneous"),
    ],
)
def test_sacct_is_read(text: str, states: dict[str, JobState]) -> None:
    assert parse_sacct(text) == states


@pytest.mark.parametrize(
    ("state", "pending", "over"),
    [
        ("PENDING", True, False),
        ("REQUEUED", True, False),
        ("RUNNING", False, False),
        ("COMPLETING", False, False),
        ("COMPLETED", False, True),
        ("NODE_FAIL", False, True),
        ("OUT_OF_MEMORY", False, True),
        ("SPECIAL_EXIT", True, False),
        ("A_STATE_OF_A_LATER_SLURM", False, False),
    ],
    ids=str,
)
def test_what_a_state_means(state: str, pending: bool, over: bool) -> None:
    found = JobState(id="1", state=state)
    assert (found.pending, found.over) == (pending, over)


def test_starts_are_ordered_by_submission_then_restart() -> None:
    starts = [Start(1, 0), Start(0, 10), Start(0, 2), Start(0, 0)]
    assert sorted(starts) == starts[::-1]
    assert [Start.parse(str(start)) for start in starts] == starts
