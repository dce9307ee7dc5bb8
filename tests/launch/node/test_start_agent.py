"""A job starts only what nobody but its user can have written."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.containers import ContainerKind, ImageReference, Mount
from conf.schema.profile import Tracker
from launch import start_agent
from launch.control.planning.dry_run import dry_run
from launch.errors import LaunchError
from launch.files import own_path
from launch.machine.container_runtimes import RunContainer
from launch.node.settings import NodeSettings
from launch.node.worker_command import ModuleWorker, ProfiledWorker, Profiler, Worker
from megatron_ext.contract.files import write_atomic
from tests.support.launch.live import done
from tests.support.ordinary_user import NOBODY, only_root_is_two_users, open_to_others, run_by

EVERYBODY = 0o777


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """What an agent is to do, in the folder of a run."""
    run = RunDir.create(tmp_path / "runs", "tiny", "", datetime.now())
    path = run.agent(0, "job")
    write_atomic(path, settings_of(run).to_json())
    return path


def settings_of(run: RunDir) -> NodeSettings:
    return NodeSettings(
        run=run,
        model="tiny",
        environment={"A": "1", "B": "\udcff"},
        worker=ModuleWorker("megatron_ext.worker", "python3"),
        container=None,
        nodes=(1, 0),
        het_groups=(None, 0),
        submission=0,
        resumable=True,
        meet_s=60,
        save_s=10,
        max_requeues=3,
        trackers=(Tracker.tensorboard,),
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NodeSettings]:
    found: list[NodeSettings] = []
    monkeypatch.setattr(start_agent, "run_node", found.append)
    return found


def starts(told: Path, *mode: str) -> bool:
    return start_agent.main([str(told.parent), told.name, *mode]) == 0


def test_an_agent_does_what_its_launch_has_written(told: Path, started: list[NodeSettings]) -> None:
    assert starts(told)
    assert started == [settings_of(RunDir(told.parents[1]))]


CONTAINER = RunContainer(
    kind=ContainerKind.enroot,
    image=ImageReference("nvcr.io", "nvidia/pytorch:23.04-py3"),
    file=Path("/images/a.sqsh"),
    digest=None,
    mounts=(Mount(Path("/a"), Path("/b"), read_only=True),),
    folder=Path("/tdpp"),
    python="python3",
    gpus=True,
    reload=False,
    scratch=Path("/scratch"),
    run="a/b",
)
MODULE = ModuleWorker("megatron_ext.worker", "p")
PROFILED = ProfiledWorker(worker=MODULE, profiler=Profiler.nsys, nodes=("a", "b"), iteration=3)


@pytest.mark.parametrize("worker", [MODULE, PROFILED], ids=["module", "profiled"])
@pytest.mark.parametrize("container", [CONTAINER, replace(CONTAINER, image=Path("/a.sqsh"))], ids=["registry", "file"])
def test_every_worker_and_container_is_read_as_it_was_written(
    told: Path, started: list[NodeSettings], worker: Worker, container: RunContainer
) -> None:
    settings = replace(settings_of(RunDir(told.parents[1])), worker=worker, container=container)
    write_atomic(told, settings.to_json())
    assert starts(told)
    assert started == [settings]


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["settings", "their-folder", "run-folder", "folder-of-the-name"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_can_write_is_not_started(
    told: Path,
    which: int,
    mode: int,
    started: list[NodeSettings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(own_path, "_is_private", lambda _group: False)
    assert starts(told)
    wrong = [told, *told.parents][which]
    wrong.chmod(mode)
    assert not starts(told)
    assert len(started) == 1
    assert f"error: {wrong} can be written by others (mode {mode:03o})" in capsys.readouterr().err
    if which == 3:
        wrong.chmod(mode | 0o1000)
        assert starts(told), "with the sticky bit nobody else can rename what is the user's own"


def test_a_folder_of_the_users_own_group_is_the_users_own(told: Path, started: list[NodeSettings]) -> None:
    """As umask 002 makes them where each user has a group (pam_umask, usergroups)."""
    told.parents[2].chmod(0o775)
    found = grp.getgrgid(told.parents[2].stat().st_gid)
    private = found.gr_name == pwd.getpwuid(os.geteuid()).pw_name and not found.gr_mem
    assert starts(told) == private


def test_with_runs_mode_group_the_runs_folder_and_those_above_may_be_its_groups(
    told: Path, started: list[NodeSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_path, "_is_private", lambda _group: False)
    run = told.parents[1]
    run.chmod(0o2775)
    run.parent.chmod(0o2775)
    assert starts(told, "group")
    for path, mode in ((run, 0o777), (told.parent, 0o775), (told, 0o775), (run.parent, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert not starts(told, "group")
        assert f"error: {path} can be written by others (mode {mode:03o})" in capsys.readouterr().err
        path.chmod(before)


def test_what_is_no_file_of_this_run_and_version_is_not_started(
    told: Path, started: list[NodeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    content = told.read_text()
    for wrong, why in (
        (content.replace('"nodes"', '"knots"'), "lacks nodes"),
        (content.replace('"ModuleWorker"', '"os.system"'), "must be one of ModuleWorker, ProfiledWorker"),
        (content.replace(str(told.parents[1]), "/another"), "is of another run, /another"),
        (content[:-9], "launch the run again"),
    ):
        told.write_text(wrong)
        assert not starts(told)
        assert why in capsys.readouterr().err
    told.unlink()
    assert not starts(told)
    assert f"error: {told} is missing" in capsys.readouterr().err
    target = told.with_name("target.json")
    target.write_text(content)
    told.symlink_to(target)
    assert not starts(told)
    assert start_agent.main([str(told.parent), "group"]) == 1, "as a job of an older version says"
    assert "submitted by an older version of tdpp; launch the run again" in capsys.readouterr().err
    assert not started


@only_root_is_two_users
def test_a_run_is_not_launched_in_a_folder_that_another_user_owns(runs: Path, tmp_path: Path) -> None:
    """Who owns a folder may rename what lies in it, whatever its mode."""
    runs.mkdir()
    runs.chmod(0o1777)
    foreign = runs / "tiny"
    foreign.mkdir(mode=0o1777)
    os.chown(foreign, NOBODY, NOBODY)
    for mode in (0o1777, 0o755):
        foreign.chmod(mode)
        for also in ([], ["runs_mode=group"]):
            refused = done("launch", "train.iterations=6", f"runs_dir={runs}", *also, cwd=tmp_path)
            assert refused.returncode == 1
            assert f"{foreign} belongs to user nobody, who could replace the runs in it" in refused.stderr
            assert "choose another name= or a runs_dir= of your own" in refused.stderr
            assert list(foreign.iterdir()) == []
    assert done("launch", "train.iterations=6", f"runs_dir={runs}", "name=own", cwd=tmp_path).returncode == 0


ATTACK = """
import ctypes, os, sys, time
run, evil, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
until, swaps, refused = time.monotonic() + seconds, 0, 0
print("ready", flush=True)
while time.monotonic() < until:
    if renameat2(-100, run.encode(), -100, evil.encode(), 2) == 0:  # exchanges both at once
        swaps += 1
    else:
        refused += 1
print(swaps, refused)
"""


@only_root_is_two_users
@pytest.mark.slow
def test_no_start_runs_what_the_owner_of_the_names_folder_puts_in_its_place(tmp_path: Path) -> None:
    """He exchanges the run's folder for one of his all the while, thousands of times."""
    with open_to_others() as folder:
        folder.chmod(0o1777)
        name = folder / "tiny"
        name.mkdir()
        run = RunDir.create(folder, "tiny", "", datetime.now())
        write_atomic(run.agent(0, "job"), settings_of(run).to_json())
        evil = name / "evil"
        shutil.copytree(run.path, evil)
        bad = replace(settings_of(run), worker=ModuleWorker("evil", "python3"))
        (evil / "submitit" / "agent-0-job.json").write_text(bad.to_json())
        for path in (evil, *evil.rglob("*"), name):
            os.chown(path, NOBODY, NOBODY)
        words = [sys.executable, "-c", ATTACK, str(run.path), str(evil), "6"]
        attacker = subprocess.Popen([*run_by(NOBODY), *words], stdout=subprocess.PIPE, text=True)
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        tries = ran = 0
        while attacker.poll() is None:
            for group in (False, True):
                tries += 1
                with contextlib.suppress(LaunchError):
                    settings = NodeSettings.read(run, "agent-0-job.json", group=group)
                    assert settings.worker == ModuleWorker("megatron_ext.worker", "python3")
                    ran += 1
        assert int(attacker.stdout.read().split()[0]) > 100
        assert tries > 100
        assert ran == 0, "somebody else may rename what the agent would open next"


def test_a_script_says_that_the_runs_folder_may_be_its_groups() -> None:
    experiment = compose(["experiment=seed_a10x8", "container=none", "runs_mode=group"])
    text = dry_run(experiment, "w").full()
    assert text.count("launch.start_agent") == text.count(".json group >>") > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_run_that_others_could_have_changed_is_not_resumed(tmp_path: Path, mode: int) -> None:
    assert done("launch", "train.iterations=6", cwd=tmp_path).returncode == 0
    run = RunDir.find(tmp_path / "runs", None)
    for path in (run.path, run.config, run.submitit):
        before = path.stat().st_mode
        path.chmod(mode)
        resumed = done("launch", f"resume={run.path}", cwd=tmp_path)
        assert resumed.returncode == 1
        assert f"{path} can be written by others (mode {mode:03o})" in resumed.stderr
        path.chmod(before)


def test_runs_mode_group_lets_the_group_write_what_ranks_write_and_nothing_that_starts_them(tmp_path: Path) -> None:
    assert done("launch", "train.iterations=6", "runs_mode=group", cwd=tmp_path).returncode == 0
    run = RunDir.find(tmp_path / "runs", None)
    for folder in (run.path, run.nodes, run.events, run.errors, run.checkpoints):
        assert oct(folder.stat().st_mode & 0o7777) == "0o2775", folder
    assert run.metrics.stat().st_mode & 0o020
    started = [run.config, run.plan, run.jobs, run.secret, *(run.submitit, *run.submitit.rglob("*"))]
    assert {path: oct(path.stat().st_mode) for path in started if path.stat().st_mode & 0o022} == {}
    resumed = done("launch", f"resume={run.path}", cwd=tmp_path)
    assert "can be written by others" not in resumed.stderr


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o002, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_a_run_is_as_closed_as_the_umask_and_never_others_to_write(
    tmp_path: Path, umask: int, folder: int, file: int
) -> None:
    before = os.umask(umask)
    try:
        assert done("launch", "train.iterations=6", cwd=tmp_path).returncode == 0
    finally:
        os.umask(before)
    run = RunDir.find(tmp_path / "runs", None)
    assert run.path.stat().st_mode & EVERYBODY == folder
    assert run.plan.stat().st_mode & EVERYBODY == file
    assert run.secret.stat().st_mode & EVERYBODY == 0o600
    modes = {path: path.lstat().st_mode for path in run.path.rglob("*") if not path.is_symlink()}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o022} == {}


def test_a_runs_folder_that_a_group_shares_stays_shared(tmp_path: Path) -> None:
    """Not the runs in it: those are their owners' alone."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o2775)
    assert done("launch", "train.iterations=6", cwd=tmp_path).returncode == 0
    run = RunDir.find(runs, None)
    assert [oct(path.stat().st_mode & 0o7777) for path in (run.path.parent, runs / "by_job")] == ["0o2775"] * 2
    assert run.path.stat().st_mode & EVERYBODY == 0o755


@only_root_is_two_users
def test_in_a_container_without_roots_rights_roots_folders_are_still_roots(
    told: Path, started: list[NodeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There they look as if they were of a user whom nobody knows; others' folders do so, too."""
    assert own_path._unknown_user() is None
    runs = told.parents[3]
    os.chown(runs, NOBODY, NOBODY)
    assert not starts(told)
    monkeypatch.setattr(own_path, "_unknown_user", lambda: NOBODY)
    assert starts(told)
    runs.parent.chmod(0o1777)
    assert not starts(told), "where everybody may make a folder, it need not be root's"
