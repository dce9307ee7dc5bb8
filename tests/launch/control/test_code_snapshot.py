"""A run keeps the code that it was launched with: a copy that is laid out as the original."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from launch.files import code_snapshot
from launch.files.code_snapshot import Snapshot, keep_code

LARGE = code_snapshot.MOST_BYTES_OF_FILE + 1


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A user's folder: code that reads what lies beside and above it, data, and runs."""
    work = tmp_path / "above" / "work"
    (work / "package").mkdir(parents=True)
    (work / "my.py").write_text("import package.part\n")
    (work / "package" / "part.py").write_text("WIDTH = 16\n")
    (work / "words.txt").write_text("a b c\n")
    (work / "large.bin").write_bytes(bytes(LARGE))
    (work.parent / "beside.py").write_text("# a file above\n")
    return work


def kept(work: Path) -> tuple[Snapshot, RunDir]:
    run = RunDir.create(work / "runs", "mine", "{}", datetime.now())
    (run.path / "secret").write_text("not to be copied")
    return keep_code(work / "my.py", run), run


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True)


def test_files_are_copied_and_everything_else_is_linked(work: Path) -> None:
    found, _ = kept(work)
    tree = found.file.parent
    for name in ("my.py", "package/part.py", "words.txt"):
        original = (work / name).read_text()
        (work / name).write_text("edited")
        assert (tree / name).read_text() == original
        assert not (tree / name).stat().st_mode & 0o222
    assert (tree / "large.bin").samefile(work / "large.bin")
    assert (tree.parent / "beside.py").read_text() == "# a file above\n"
    assert (found.root, found.copied, found.left_out) == (work, 3, 0)
    assert (found.commit, found.changed) == (None, None)


@pytest.mark.parametrize("in_git", [False, True])
def test_no_run_is_copied_into_a_run(work: Path, in_git: bool) -> None:
    if in_git:
        git(work, "init", "-q")
    kept(work)
    found, run = kept(work)
    assert not list(run.code_tree.rglob("secret"))
    assert not (found.file.parent / "runs").exists()


def test_of_a_git_tree_the_whole_tree_is_kept_with_its_commit_and_diff(work: Path) -> None:
    top = work.parent
    (top / ".gitignore").write_text("words.txt\nruns\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "first")
    (top / "beside.py").write_text("# changed\n")
    (work / "new.py").write_text("# not added yet\n")
    found, run = kept(work)
    tree = found.file.parent
    assert found.root == top
    assert found.commit is not None
    assert found.changed == [" M beside.py", "?? work/new.py"]
    assert "+# changed" in run.code_diff.read_text()
    assert not (tree.parent / "beside.py").is_symlink()
    assert not (tree / "new.py").is_symlink()
    assert (tree / "words.txt").is_symlink()  # ignored, as data are
    assert not (tree.parent / ".git").exists()


def test_git_trees_within_a_git_tree_are_kept_and_the_diff_is_that_of_the_outer_one(work: Path) -> None:
    lib = work / "lib"
    lib.mkdir()
    (lib / "part.py").write_text("x = 1\n")
    for top in (lib, work):  # as a submodule is, for git: a commit of another tree
        git(top, "init", "-q")
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", "first")
    (lib / "part.py").write_text("x = 2\n")
    (work / "my.py").write_text("# changed\n")
    found, run = kept(work)
    copy = found.file.parent / "lib" / "part.py"
    (lib / "part.py").write_text("x = 3\n")
    assert copy.read_text() == "x = 2\n"
    assert "+# changed" in run.code_diff.read_text()


def test_a_folder_of_many_files_is_linked_whole_unless_they_are_code(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_snapshot, "MOST_TOGETHER", 3)
    for folder, suffix in (("images", "png"), ("parts", "py"), ("few", "txt")):
        (work / folder).mkdir()
        for number in range(4 if folder != "few" else 3):
            (work / folder / f"{number}.{suffix}").write_text("x")
    tree = kept(work)[0].file.parent
    assert [(tree / folder).is_symlink() for folder in ("images", "parts", "few")] == [True, False, False]
    assert not (tree / "parts" / "3.py").is_symlink()


def test_a_file_that_git_ignores_or_that_is_large_is_copied_if_it_is_the_one(work: Path) -> None:
    (work / ".gitignore").write_text("my.py\n")
    (work / "my.py").write_text("#" * LARGE)
    git(work, "init", "-q")
    found, _ = kept(work)
    assert not found.file.is_symlink()
    assert found.file.stat().st_size == LARGE


def test_what_has_no_room_is_linked_or_counted(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_snapshot, "MOST_FILES", 2)
    found, _ = kept(work)
    tree = found.file.parent
    assert found.copied == 2
    assert [(tree / name).is_symlink() for name in ("my.py", "package/part.py")] == [False, False]
    assert found.left_out == 1  # of words.txt, large.bin and beside.py
    assert str(found) == f"2 files of {work}, without 1 file for which there was no room"


def test_a_pipe_is_linked_and_a_link_that_leads_nowhere_stays(work: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "nowhere.py").symlink_to("gone.py")
    found, _ = kept(work)
    assert (found.file.parent / "pipe").is_fifo()
    assert (found.file.parent / "nowhere.py").is_symlink()


def test_what_a_run_kept_is_kept_again_as_it_was(work: Path) -> None:
    top = work.parent
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "first")
    (top / "beside.py").write_text("# changed\n")
    first, run = kept(work)
    run.write_json(run.provenance, {"code": first.as_json()})
    for file in (run.config, run.plan):  # a whole run has them
        file.write_text("")
    (work / "my.py").write_text("# edited since\n")
    again = RunDir.create(work / "runs", "mine", "{}", datetime.now())
    second = keep_code(first.file, again)
    assert second.file == again.code_tree / first.file.relative_to(run.code_tree)
    assert second.file.read_text() == "import package.part\n"
    assert (second.file.parent / "large.bin").is_symlink()
    assert (second.copied, second.linked) == (first.copied, first.linked)
    assert (second.commit, second.changed) == (first.commit, first.changed)
    assert again.code_diff.read_text() == run.code_diff.read_text()
