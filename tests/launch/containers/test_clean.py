"""`tdpp clean` removes what runs have left, all of it, and nothing that is needed or another user's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from conf.schema.containers import ImageReference
from conf.schema.experiment import ContainerKind
from launch.commands import clean
from launch.control.stop import stop
from launch.errors import LaunchError
from launch.files.locks import FileLock
from launch.machine.container_runtimes import RunContainer
from launch.node.container_setup import Setup, private_folder
from tests.launch.containers.conftest import Runtime
from tests.support.launch import live
from tests.support.launch.live import FOREVER, wait_for
from tests.support.launch.run_folders import Case, Node
from tests.support.ordinary_user import NOBODY, only_root_is_two_users

DAY_S = 86400
REFERENCE = ImageReference.parse("registry.test/small:1.0")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def options(tmp_path: Path, scratch: Path) -> list[str]:
    (tmp_path / "runs").mkdir(exist_ok=True)
    return [f"--runs-dir={tmp_path}/runs", f"--scratch={scratch}"]


@pytest.fixture
def container(image: Path, tmp_path: Path, scratch: Path) -> RunContainer:
    """Of an image that tdpp is to fetch."""
    return RunContainer(
        kind=ContainerKind.enroot,
        image=REFERENCE,
        file=tmp_path / "images" / f"{REFERENCE.file_stem}.sqsh",
        digest=None,
        mounts=(),
        folder=tmp_path,
        python="python3",
        gpus=False,
        reload=False,
        scratch=scratch,
        run="tiny/1",
    )


@pytest.fixture
def used(double: Runtime, container: RunContainer, image: Path) -> RunContainer:
    """With its image and its container, which a run has used."""
    shutil.copy(image, double.registry / REFERENCE.enroot.replace("/", "+"))
    with Setup(container, 0) as setup:
        wait_for(setup.step)
    return container


def unfinished(runs: Path, name: str = "tiny") -> RunDir:
    """The folder of a launch that was killed before it had a plan."""
    run = RunDir.create(runs, name, "x", datetime(2026, 1, 2))
    launcher = [
        sys.executable,
        "-c",
        "import sys; from pathlib import Path; from conf.run_folder.rundir import RunDir; "
        "from launch.files.locks import launching; import os\n"
        "with launching(RunDir(Path(sys.argv[1]))): os._exit(9)",
    ]
    subprocess.run([*launcher, str(run.path)], check=False, env=live.ENVIRONMENT)
    return run


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What would be removed, in the order of the list."""
    capsys.readouterr()
    assert clean.main([*options]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    if lines == ["nothing to remove"]:
        return []
    assert told.err == "nothing removed; add --yes to remove all of it\n"
    return [line.split("  ")[0].strip() for line in lines[1:]]


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def test_without_leave_it_lists_and_removes_nothing(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unfinished(tmp_path / "runs")
    assert listed(capsys, *options) == ["unfinished launch"]
    assert run.path.exists()


def test_a_folder_of_runs_that_is_not_there_is_an_error_that_names_it(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=rf"^--runs-dir {tmp_path}/nosuch: No such file or directory; give a "):
        clean.main([*options, f"--runs-dir={tmp_path}/nosuch"])


def test_without_any_runs_it_finds_what_is_left_elsewhere(
    used: RunContainer,
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("TDPP_RUNS_DIR", raising=False)
    assert listed(capsys, f"--scratch={scratch}", "--older-than=0") == ["lock", "container"]


def test_a_launch_that_was_cut_off_goes_with_its_link_and_the_empty_folder_of_its_name(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unfinished(tmp_path / "runs")
    run.link_job("4711")
    assert clean.main([*options, "--yes"]) == 0
    assert capsys.readouterr().out.endswith("\nremoved 1 of 1\n")
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "by_job"]
    assert list((tmp_path / "runs" / "by_job").iterdir()) == []


def test_a_launch_that_goes_on_is_left_alone(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unfinished(tmp_path / "runs")
    code = "import sys,time; from pathlib import Path; from conf.run_folder.rundir import RunDir\n"
    code += "from launch.files.locks import *\n"
    code += "with launching(RunDir(Path(sys.argv[1]))): print(flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code, str(run.path)]
    with subprocess.Popen(words, env=live.ENVIRONMENT, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        try:
            assert listed(capsys, *options) == []
        finally:
            launcher.kill()
    assert listed(capsys, *options) == ["unfinished launch"]


def test_runs_are_left_alone_whatever_their_end(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stamp, nodes in (
        ("20260101-000000-a", [None, None]),
        ("20260101-000001-b", [Node(state="ended", exit_code=1)] * 2),
    ):
        Case(nodes=nodes).make(tmp_path / "runs" / "tiny" / stamp)
    broken = Case(nodes=[Node(state="ended", exit_code=0)] * 2).make(tmp_path / "runs" / "tiny" / "20260101-000002-c")
    (broken.checkpoints / "iter_0000001").mkdir(parents=True)
    broken.plan.unlink()  # it was started, and may have trained for days
    assert listed(capsys, *options, "--older-than=0") == []


def test_jobs_of_the_doctor_go_once_they_are_over(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = live.start(tmp_path / "runs" / "doctor", *FOREVER)
    try:
        assert listed(capsys, *options) == []
    finally:
        stop(run)
    assert listed(capsys, *options) == ["job of tdpp doctor"]
    assert clean.main([*options, "--yes"]) == 0
    assert not run.path.exists()
    assert listed(capsys, *options) == []


def test_links_to_runs_that_are_gone_are_removed(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, there = (
        Case(nodes=[None, None]).make(tmp_path / "runs" / "tiny" / name) for name in ("20260101-000000-a", "b-c-d")
    )
    for number, run in enumerate((gone, there)):
        run.link_job(str(number))
    shutil.rmtree(gone.path)
    assert clean.main([*options, "--yes"]) == 0
    assert [path.name for path in (tmp_path / "runs" / "by_job").iterdir()] == ["1"]


def test_images_and_containers_go_by_age(
    double: Runtime, used: RunContainer, options: list[str], scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert used.file is not None
    lock = next(path for path in private_folder(scratch).glob("*.lock") if path.with_suffix(".made").exists())
    assert listed(capsys, *options) == ["lock"]  # that of the image, which is needed only while it is fetched
    assert listed(capsys, *options, "--older-than=1") == []
    age(used.file, 40)
    age(lock, 31)
    assert listed(capsys, *options) == ["lock", "image", "container"]
    assert listed(capsys, *options, "--older-than=35") == ["image"]
    assert clean.main([*options, "--older-than=0", "--yes"]) == 0
    assert list(used.file.parent.iterdir()) == []
    assert list(private_folder(scratch).iterdir()) == []
    assert double("list").stdout == ""
    with Setup(used, 0) as setup:  # the next run finds nothing, and makes it
        wait_for(setup.step)


def test_a_container_that_a_run_holds_and_its_lock_stay(
    double: Runtime, used: RunContainer, options: list[str], capsys: pytest.CaptureFixture[str], scratch: Path
) -> None:
    with Setup(used, 0) as setup:
        wait_for(setup.step)
        assert "container" not in listed(capsys, *options, "--older-than=0")
        assert clean.main([*options, "--older-than=0", "--yes"]) == 0
        assert double("list").stdout.split() == [setup.name]
        assert (private_folder(scratch) / f"{setup.name}.lock").exists()


def test_a_container_that_a_run_takes_while_the_question_is_asked_stays(
    double: Runtime,
    used: RunContainer,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Setup(used, 0) as setup:

        def agreed(question: str) -> bool:
            assert question == "remove all 3, " + question.split(", ")[1]
            wait_for(setup.step)
            return True

        monkeypatch.setattr(clean, "can_be_asked", lambda: True)
        monkeypatch.setattr(clean, "agreed", agreed)
        with pytest.raises(LaunchError, match=r"could not be removed: tdpp-\S+: a run uses it now$"):
            clean.main([*options, "--older-than=0"])
        assert double("list").stdout.split() == [setup.name]


def test_the_image_of_a_run_that_is_not_over_stays(
    double: Runtime, used: RunContainer, options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert used.file is not None
    run = live.start(tmp_path / "runs", *FOREVER)
    config = OmegaConf.load(run.config)
    config.container.kind, config.container.image = "enroot", str(REFERENCE)
    OmegaConf.save(config, run.config)
    try:
        assert "image" not in listed(capsys, *options, "--older-than=0")
    finally:
        stop(run)
    assert "image" in listed(capsys, *options, "--older-than=0")


def test_what_others_put_beside_images_and_locks_stays(
    options: list[str], tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("mine.sqsh", "notes.txt", ".host.half.sqsh"):
        (images / name).touch()
        age(images / name, 100)
    assert listed(capsys, *options) == ["part of an image"]
    assert clean.main([*options, "--yes"]) == 0
    assert sorted(path.name for path in images.iterdir()) == ["mine.sqsh", "notes.txt"]


@only_root_is_two_users
def test_nothing_of_another_user_is_touched(
    double: Runtime,
    used: RunContainer,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scratch: Path,
) -> None:
    assert used.file is not None
    run = unfinished(tmp_path / "runs")
    run.link_job("4711")
    for path in (run.path, used.file, private_folder(scratch)):
        os.chown(path, NOBODY, NOBODY)
    shutil.rmtree(run.path / "nodes")
    (run.path / "nodes").mkdir()
    assert listed(capsys, *options, "--older-than=0") == []


def test_one_that_cannot_be_removed_hinders_no_other(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = unfinished(tmp_path / "runs", "a"), unfinished(tmp_path / "runs", "b")
    rmtree = shutil.rmtree

    def refused(path: Path) -> None:
        if path == first.path:
            raise PermissionError(1, "Operation not permitted", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(LaunchError, match=rf"could not be removed: {first.path}: Operation not permitted$"):
        clean.main([*options, "--yes"])
    assert first.path.exists()
    assert not second.path.exists()


def test_who_waits_for_a_lock_that_is_removed_takes_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with FileLock(path) as first, FileLock(path) as second, FileLock(path) as third:
        assert first.try_take(fcntl.LOCK_EX)
        path.unlink()
        first.close()
        assert second.try_take(fcntl.LOCK_EX)
        assert path.exists()
        assert not third.try_take(fcntl.LOCK_EX)
