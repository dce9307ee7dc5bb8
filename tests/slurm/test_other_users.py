"""Jobs of another user on a real Slurm cluster."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.commands import stop as stop_command
from launch.control import stop
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine.slurm_commands import comment_of
from tests.support.launch.live import ENVIRONMENT, FOREVER, TDPP
from tests.support.launch.run_folders import Case
from tests.support.ordinary_user import DAEMON, NOBODY, only_root_is_two_users, open_to_others, run_by
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import NODES, SMALL, endless, ids, occupied

Typed = Callable[..., subprocess.CompletedProcess[str]]
"""`tdpp` as a user types it, to its end: the user's id, then the words."""


@only_root_is_two_users
def test_root_ends_the_jobs_of_another_users_run(slurm: Cluster, tmp_path: Path) -> None:
    """One waits for the other; no agents are in them, since the other user may not read this Python."""
    token, ids = "0123456789abcdef", []
    for more in ([], ["--dependency=after:{}", "--kill-on-invalid-dep=yes"]):
        words = [word.format(*ids) for word in [*more, f"--uid={NOBODY}", f"--comment={comment_of(token)}"]]
        job = slurm.run("sbatch", "--parsable", "-o", "/dev/null", "--chdir=/", *words, "--wrap", "sleep 300")
        assert job.returncode == 0, job.stderr
        ids.append(job.stdout.strip())
    run = Case(nodes=[None, None]).make(tmp_path / "runs" / "tiny" / "20260101-000000-a")
    jobs = [{"id": job, "role": role, "nodes": [node]} for node, (role, job) in enumerate(zip("ms", ids, strict=True))]
    run.write_json(run.jobs, {"token": token, "executor": "slurm", "submission": 0, "jobs": jobs})
    os.chown(run.path, NOBODY, NOBODY)
    assert stop_command.main([str(run.path)]) == 0
    assert not slurm.jobs()
    assert judge(run).state is State.stopped


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which every user may make a runs_dir."""
    with open_to_others() as folder:
        folder.chmod(0o1777)
        yield folder


@pytest.fixture
def typed(slurm: Cluster, shared: Path) -> Typed:
    def run(user: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return as_user(slurm, user, *TDPP, *words, cwd=shared)

    return run


def as_user(slurm: Cluster, user: int, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Also where whoever runs the tests has a PYTHONPATH, which `slurm.env` inherits."""
    name = pwd.getpwuid(user).pw_name
    home = cwd / f"home-{name}"
    home.mkdir(exist_ok=True)
    os.chown(home, user, user)
    own = {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "USER": name, "LOGNAME": name, "HOME": str(home)}
    return subprocess.run(
        [*run_by(user), f"--regid={user}", *words],
        cwd=cwd,
        env=slurm.env | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def content(run: RunDir) -> dict[Path, tuple[int, bytes]]:
    """What a run's folder holds, but for what its own agents go on writing."""
    files = {path: path.lstat() for path in run.path.rglob("*") if path.is_file() and path.parent == run.path}
    kept = {run.config, run.plan, run.jobs, run.provenance, run.overrides, run.launch_lock, run.stop_request}
    return {path: (found.st_uid, path.read_bytes()) for path, found in files.items() if path in kept}


def sees_but_cannot_change(slurm: Cluster, typed: Typed, user: int, run: RunDir, state: str, owner: str) -> None:
    """All that `user` tries on the run of `owner`, whose verdict is `state` before and after."""
    name, runs, before = run.name, f"--runs-dir={run.runs}", content(run)
    listed = typed(user, "runs", runs)
    assert listed.returncode == 0, listed.stderr
    assert re.search(rf"^{name} +{state}", listed.stdout, re.MULTILINE), listed.stdout
    told = typed(user, "status", run.path)
    assert (told.returncode, told.stdout.split(",")[0]) == (0, f"{name}: {state}"), told
    assert typed(user, "logs", run.path).returncode == 0
    page = run.runs.parent / f"page-{user}"
    reported = typed(user, "report", run.path, f"--output={page}")
    assert (reported.returncode, page.exists()) == (0, True), reported
    stopped = typed(user, "stop", run.path)
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert (
        f"the run belongs to {owner}, and user {pwd.getpwuid(user).pw_name} cannot end its processes" in stopped.stderr
    )
    assert stopped.stderr.endswith(f"; only {'root' if owner == 'root' else f'{owner} or root'} can stop it\n")
    resumed = typed(user, "launch", f"resume={run.path}")
    assert resumed.returncode == 1
    assert f"resume={name}: the run belongs to {owner}" in resumed.stderr
    cleaned = typed(user, "clean", runs, "--older-than=0", "--yes", f"--scratch={run.runs.parent}")
    assert (cleaned.returncode, cleaned.stdout) == (0, "nothing to remove\n"), cleaned
    for job in ids(run):
        assert as_user(slurm, user, "scancel", job, cwd=run.runs.parent).returncode != 0
    assert content(run) == before
    told = typed(user, "status", run.path)
    assert told.stdout.split(",")[0] == f"{name}: {state}"


@only_root_is_two_users
def test_another_user_sees_a_run_at_work_and_cannot_change_it(slurm: Cluster, typed: Typed, shared: Path) -> None:
    run = endless(shared)
    sees_but_cannot_change(slurm, typed, NOBODY, run, "running", "root")
    stop.stop(run)


@only_root_is_two_users
def test_two_ordinary_users_see_and_cannot_change_each_others_runs(slurm: Cluster, typed: Typed, shared: Path) -> None:
    """Their jobs wait in the queue: on the nodes they could not read this Python."""
    with occupied(slurm, "--partition=hgx"), occupied(slurm, "--partition=gpu2", "--nodes=7"):
        runs = {}
        for user, other in ((NOBODY, DAEMON), (DAEMON, NOBODY)):
            launched = typed(user, "launch", f"runs_dir={shared}/{user}", *NODES, *SMALL, *FOREVER)
            assert launched.returncode == 0, launched.stderr
            runs[user] = RunDir.find(shared / str(user), None)
            assert runs[user].path.stat().st_uid == user
            sees_but_cannot_change(slurm, typed, other, runs[user], "starting", pwd.getpwuid(user).pw_name)
        for user, run in runs.items():
            stopped = typed(user, "stop", run.path)
            assert stopped.returncode == 0, stopped.stderr
            assert f"{run.name}: stopped" in stopped.stdout
