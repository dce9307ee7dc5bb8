"""A job starts only what nobody but its user can have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch import start_agent
from launch.control.planning.dry_run import dry_run_text
from launch.errors import LaunchError
from launch.start_agent import require_own
from tests.support.launch.live import done

EVERYBODY = 0o777


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "submitit" / "7_submitted.pkl"
    path.parent.mkdir(parents=True, mode=0o755)
    path.write_bytes(b"")
    for part in (path, *path.parents[:2]):
        part.chmod(0o755)
    return path


@pytest.mark.parametrize("which", [0, 1, 2], ids=["pickle", "its-folder", "run-folder"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_can_write_is_not_started(
    pickled: Path, which: int, mode: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", "")
    started = []
    monkeypatch.setattr("submitit.core.submission.process_job", started.append)
    assert start_agent.main([str(pickled.parent)]) == 0
    wrong = [pickled, *pickled.parents][which]
    wrong.chmod(mode)
    assert start_agent.main([str(pickled.parent)]) == 1
    assert started == [pickled.parent]
    assert f"error: {wrong} can be written by others (mode {mode:03o})" in capsys.readouterr().err


def test_with_runs_mode_group_the_runs_folder_alone_may_be_its_groups(
    pickled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", "")
    monkeypatch.setattr("submitit.core.submission.process_job", lambda folder: None)
    run = pickled.parents[1]
    run.chmod(0o2775)
    assert start_agent.main([str(pickled.parent), "group"]) == 0
    for path, mode in ((run, 0o777), (pickled.parent, 0o775), (pickled, 0o775)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert start_agent.main([str(pickled.parent), "group"]) == 1
        assert f"error: {path} can be written by others (mode {mode:03o})" in capsys.readouterr().err
        path.chmod(before)


def test_a_script_says_that_the_runs_folder_may_be_its_groups() -> None:
    experiment = compose(["experiment=seed_a10x8", "container=none", "runs_mode=group"])
    text = dry_run_text(experiment, "w")
    assert text.count("launch.start_agent") == text.count('launch.start_agent "$FOLDER" group >>') > 0


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


def test_a_link_or_a_foreign_file_is_not_started(pickled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = pickled.with_name("link.pkl")
    link.symlink_to(pickled)
    with pytest.raises(LaunchError, match="is a link"):
        require_own(link)
    require_own(pickled)
    monkeypatch.setattr(os, "geteuid", lambda: pickled.stat().st_uid + 1)
    with pytest.raises(LaunchError, match="belongs to user"):
        require_own(pickled)


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
