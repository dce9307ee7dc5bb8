"""The user's code as it was at the launch: a copy in the run's folder, from which the ranks import it.

It is laid out as the original is, so that what a file finds beside it, or above it, is found there, too: files of
reasonable size are copied, everything else is a link to the original.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from conf.run_folder.run_folders import run_around
from conf.run_folder.rundir import RunDir
from conf.visible import plural
from launch.machine.provenance import git
from megatron_ext.contract.files import write_atomic

MOST_BYTES_OF_FILE = 1 << 20
MOST_BYTES = 64 << 20
MOST_FILES = 10_000
"""A tree that has more than these is copied up to them, files near the top first; the rest is links."""
MOST_TOGETHER = 500
"""Files of one folder that are not Python's; where there are more, they are not copied."""
MOST_BESIDE = 200
"""Entries in the folder above one without git, which are linked, too: a file may import from a folder beside its own.
Where there are more, the folder is one in which unlike things lie, such as a home."""
_SKIPPED = ("__pycache__", ".git")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was kept of a user's code."""

    root: Path
    """The folder that was copied: the git tree of the file, or the file's own folder."""
    file: Path
    """The copy of the file that was asked for."""
    copied: int
    linked: int
    left_out: int
    """Entries for which there was no room."""
    commit: str | None
    changed: list[str] | None
    """Files of the git tree that differ from the commit, as `git status --porcelain` prints them."""

    def __str__(self) -> str:
        left = f", without {plural(self.left_out, 'file')} for which there was no room" if self.left_out else ""
        return f"{plural(self.copied, 'file')} of {self.root}{left}"

    def as_json(self) -> dict[str, object]:
        """What the run's folder says of it."""
        return {
            "root": str(self.root),
            "copied": self.copied,
            "linked": self.linked,
            "left_out": self.left_out,
            "commit": self.commit,
            "changed": self.changed,
        }


def keep_code(file: Path, run: RunDir) -> Snapshot:
    """Copies the user's Python file and the tree that it lies in to the run's folder, with the diff from its commit.
    Raises OSError: it cannot be read or written."""
    file = Path(os.path.abspath(file))  # noqa: PTH100  (resolves '..', follows no link)
    found = run_around(file)
    if found is not None and RunDir(found).code_tree in file.parents:
        return _copied_again(RunDir(found), file, run)
    git = _Git(file.parent)
    root = git.root or file.parent
    base = root if git.root else _above(root)
    runs = run.path.parent if run.runs in file.parents else run.runs
    sizes = {file: 0, **dict(_files_of(root, git, runs))}  # it is copied even if it is large, or git ignores it
    chosen = _chosen(sizes, file)
    for path in chosen:
        copy = run.code_tree / path.relative_to(base)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(path.stat().st_mode & 0o555)  # an editor says that this is not the place to change it
    linked, left_out = _link_others(base, run.code_tree, chosen, runs)
    if git.root is not None:
        diff = "" if git.changed == [] else git.text("diff", "--no-ext-diff", "--binary", "HEAD")
        write_atomic(run.code_diff, diff or "")
    return Snapshot(
        root=root,
        file=run.code_tree / file.relative_to(base),
        copied=len(chosen),
        linked=linked,
        left_out=left_out,
        commit=git.commit,
        changed=git.changed,
    )


def _copied_again(kept: RunDir, file: Path, run: RunDir) -> Snapshot:
    """Copies what another run kept, whole and with its links: what it left out, nobody can know."""
    shutil.copytree(kept.code_tree, run.code_tree, symlinks=True)
    if kept.code_diff.is_file():
        shutil.copyfile(kept.code_diff, run.code_diff)
    entries = [Path(folder) / name for folder, *names in os.walk(run.code_tree) for name in chain(*names)]
    links = sum(path.is_symlink() for path in entries)
    files = sum(path.is_file() and not path.is_symlink() for path in entries)
    origin = kept.read_object(kept.provenance, ()) or {}
    said = origin.get("code")
    code: Mapping[str, object] = said if isinstance(said, dict) else {}
    commit, changed = code.get("commit"), code.get("changed")
    return Snapshot(
        root=kept.code_tree,
        file=run.code_tree / file.relative_to(kept.code_tree),
        copied=files,
        linked=links,
        left_out=0,
        commit=commit if isinstance(commit, str) else None,
        changed=[*map(str, changed)] if isinstance(changed, list) else None,
    )


class _Git:
    """What git knows of the tree of a folder; nothing where there is none, or no git."""

    def __init__(self, folder: Path) -> None:
        self._at = folder
        top = self.text("rev-parse", "--show-toplevel")
        self.root = None if top is None else _as_written(folder, Path(top.rstrip("\n")))
        self._at = self.root or folder
        commit = None if self.root is None else self.text("rev-parse", "HEAD")
        self.commit = None if commit is None else commit.strip()
        status = None if self.root is None else self.text("status", "--porcelain")
        self.changed = None if status is None else status.splitlines()

    def files(self, folder: Path | None = None) -> Iterator[Path]:
        """Yields those that it tracks, and new ones that it does not ignore; also of git trees within it."""
        top = folder or self._at
        listed = self.text("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate", at=top)
        if listed is None:  # too many new files for the time there is, or git is older than 2.31
            listed = self.text("ls-files", "-z", "--cached", at=top) or ""
        for path in (top / name for name in dict.fromkeys(listed.split("\0")) if name):
            if path.is_dir() and not path.is_symlink() and (path / ".git").exists():
                yield from self.files(path)
            else:
                yield path

    def text(self, *arguments: str, at: Path | None = None) -> str | None:
        printed = git(at or self._at, *arguments)
        return None if printed is None else os.fsdecode(printed)


def _as_written(folder: Path, top: Path) -> Path | None:
    """The top of a git tree as the path of a folder in it has it, in which links are not followed."""
    return next((path for path in (folder, *folder.parents) if path.resolve() == top), None)


def _above(folder: Path) -> Path:
    """The folder above one without git if it looks like a part of the same work, else the folder itself."""
    above = folder.parent
    with suppress(OSError), os.scandir(above) as entries:
        if (
            above != Path(folder.anchor)
            and above != Path.home()
            and len(list(islice(entries, MOST_BESIDE + 1))) <= MOST_BESIDE
        ):
            return above
    return folder


def _files_of(root: Path, git: _Git, runs: Path) -> Iterator[tuple[Path, int]]:
    """The regular files of a tree that are not too large to be copied, with their sizes; but for those of runs."""
    for path in git.files() if git.root else _walked(root, runs):
        if runs in path.parents or any(part in _SKIPPED for part in path.parts):
            continue
        with suppress(OSError):
            found = path.stat()
            if path.is_file() and found.st_size <= MOST_BYTES_OF_FILE:
                yield path, found.st_size


def _walked(root: Path, runs: Path) -> Iterator[Path]:
    """Files below a folder, those near it first, up to twice as many entries as can be copied. Hidden folders are left
    out, and links to folders."""
    seen, level = 0, [root]
    while level:
        deeper: list[Path] = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > 2 * MOST_FILES:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith(".") and Path(entry.path) != runs:
                            deeper.append(Path(entry.path))
                    else:
                        yield Path(entry.path)
        level = deeper


def _chosen(sizes: Mapping[Path, int], first: Path) -> list[Path]:
    """Choose as many files as there is room for: `first`, then Python's, then those near the top. Of a folder with many
    others they are left out: those are data, and a part of them would pass for all."""
    chosen, room = [], MOST_BYTES
    others = Counter(path.parent for path in sizes if path.suffix != ".py")
    code = (path for path in sizes if path.suffix == ".py" or path == first or others[path.parent] <= MOST_TOGETHER)
    order = sorted(code, key=lambda path: (path != first, path.suffix != ".py", len(path.parts), path))
    for path in order[:MOST_FILES]:
        if sizes[path] <= room:
            room -= sizes[path]
            chosen.append(path)
    return chosen


def _link_others(base: Path, folder: Path, chosen: list[Path], runs: Path) -> tuple[int, int]:
    """Makes links to whatever else lies in the originals of the folders that hold copies, but for the runs and what
    leads to them. Returns how many, and how many more there would have been."""
    copied = set(chosen)
    real = {parent for path in chosen for parent in path.parents if parent == base or base in parent.parents}
    linked = left_out = 0
    for original in sorted(real):
        copy = folder / original.relative_to(base)
        with suppress(OSError), os.scandir(original) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path in copied or path in real or entry.name in _SKIPPED:
                    continue
                if path == runs or path in runs.parents:
                    continue
                if linked == MOST_FILES:
                    left_out += 1
                    continue
                copy.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    (copy / entry.name).symlink_to(path)
                    linked += 1
    return linked, left_out
