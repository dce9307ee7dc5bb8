"""`tdpp clean`: lists what runs have left behind, and removes it once that was agreed to."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conf.compose import read_experiment
from conf.errors import TdppError, reworded
from conf.reading.parser import Parser, option
from conf.reading.values import not_negative
from conf.run_folder import run_folders
from conf.run_folder.rundir import RunDir
from conf.schema.containers import IMAGE_SUFFIX
from conf.schema.experiment import Cluster
from conf.visible import size_text, span, visible
from launch.commands import doctor, profile
from launch.commands.run_arguments import add_runs_dir, runs_folder
from launch.commands.runs import listed
from launch.control.stop import is_over
from launch.errors import LaunchError
from launch.files.locks import FileLock, is_free, launching
from launch.judge.state import State
from launch.judge.verdict import verdict_without_plan
from launch.machine.container_commands import found_image
from launch.machine.processes import captured
from launch.node.container_setup import LIMIT_S, private_folder
from launch.node.image_file import record_of
from launch.screen import agreed, can_be_asked, print_table

DAY_S = 86400.0
DAYS = 30.0
"""Containers and images take long to make: those that were used in so many days are kept, if nothing else is asked."""


def main(argv: Sequence[str]) -> int:
    """Runs `tdpp clean <argv>`.

    Raises:
        LaunchError: something could not be removed; what could be, is.
        RunFolderError: the folder of runs is not there, or cannot be listed.
    """
    arguments = parser().parse_args(argv)
    found = list(_found(arguments))
    if not found:
        print("nothing to remove")
        return 0
    print_table(("what", "unused for", "size", "where"), [_row(one) for one in found])
    total = size_text(sum(one.size or 0 for one in found))
    question = f"remove {'it' if len(found) == 1 else f'all {len(found)}'}, {total}?"
    if not arguments.yes and not (can_be_asked() and agreed(question)):
        print("nothing removed" + ("" if can_be_asked() else "; add --yes to remove all of it"), file=sys.stderr)
        return 0
    _remove(found)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="tdpp clean",
        description="List what your runs have left behind, and ask before removing it: interrupted launches, jobs of "
        "tdpp doctor and tdpp profile, dangling links named after jobs, container images that tdpp "
        "fetched, and enroot containers and their locks on this machine. Started runs and other users' "
        "files are never touched.",
    )
    add_runs_dir(made)
    made.add_argument(
        "--image-dir",
        type=Path,
        help="container.image_dir of the runs (default: the folder images beside the folder of runs)",
    )
    made.add_argument(
        "--scratch",
        type=Path,
        default=Path(Cluster.__dataclass_fields__["scratch"].default),
        help="cluster.scratch of the runs (default: %(default)s)",
    )
    made.add_argument(
        "--older-than",
        metavar="DAYS",
        type=option(not_negative),
        help=f"only what was not used for this many days (default: {DAYS:g} for containers and images, else 0)",
    )
    made.add_argument("--yes", action="store_true", help="remove everything listed without asking")
    return made


def _found(arguments: argparse.Namespace) -> Iterator[Leftover]:
    runs, scratch, days = arguments.runs_dir, arguments.scratch, arguments.older_than
    if runs != run_folders.RUNS:  # somebody has given it
        runs_folder(arguments)
    image_dir = arguments.image_dir or runs.absolute().parent / "images"
    quick = (unfinished_runs(runs), short_jobs(runs), dead_links(runs), locks(scratch))
    slow = (images(image_dir, runs), containers(scratch))
    for sources, default in ((quick, 0.0), (slow, DAYS)):
        least_s = DAY_S * (default if days is None else days)
        yield from (one for source in sources for one in source if one.unused_s >= least_s)


def _row(one: Leftover) -> list[str]:
    return [one.what, span(one.unused_s), "" if one.size is None else size_text(one.size), visible(one.where)]


def _remove(found: Sequence[Leftover]) -> None:
    removed, failed = 0, []
    for one in found:
        try:
            one.remove()
            removed += 1
        except (LaunchError, OSError) as error:
            failed.append(f"{one.where}: {error.strerror if isinstance(error, OSError) else error}")
    print(f"removed {removed} of {len(found)}")
    if failed:
        raise LaunchError("could not be removed: " + "; ".join(failed))


SHORT_JOBS = (doctor.FOLDER, profile.FOLDER)
"""Folders in `runs_dir` whose runs were made to look at machines, and whose results were shown."""
ENROOT_S = 60.0
"""For one call of enroot."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that can be removed."""

    what: str
    where: str
    """Its path, or the name of a container on this machine."""
    unused_s: float
    """Since it was last used, as far as its files show."""
    size: int | None
    """Bytes; None where that is not known."""
    remove: Callable[[], None]
    """Raises LaunchError or OSError where it cannot be, or is in use by now."""


def unfinished_runs(runs: Path) -> Iterator[Leftover]:
    """Folders of launches that were cut off or stopped before anything was started."""
    for run in RunDir.everything(runs):
        if RunDir.is_one(run.path) or not _is_own(run.path):
            continue
        with suppress(TdppError, OSError):  # it was started, or is gone, or cannot be read
            if _never_started(run):
                yield _run("unfinished launch", run, _never_started)


def short_jobs(runs: Path) -> Iterator[Leftover]:
    """What `tdpp doctor` and `tdpp profile` leave once they are over."""
    for folder in SHORT_JOBS:
        yield from unfinished_runs(runs / folder)
        for run in RunDir.all(runs / folder):
            with suppress(TdppError, OSError):
                if _is_own(run.path) and is_over(run):
                    yield _run(f"job of tdpp {folder}", run, is_over)


def dead_links(runs: Path) -> Iterator[Leftover]:
    """Links by the ids of jobs to runs that are not there any more."""
    for folder in (runs, *(runs / name for name in SHORT_JOBS)):
        for path in run_folders.entries(folder / run_folders.BY_JOB):
            if path.is_symlink() and not path.exists() and _is_own(path):
                yield Leftover(what="dead link", where=str(path), unused_s=_unused_s(path), size=0, remove=path.unlink)


def images(folder: Path, runs: Path) -> Iterator[Leftover]:
    """Images that tdpp has fetched, which no run of `runs` uses that is not over; and parts of such."""
    suffixes = tuple(IMAGE_SUFFIX.values())
    files = [path for path in run_folders.entries(folder) if path.name.endswith(suffixes) and _is_own(path)]
    wanted = _wanted_images(runs) if files else set()
    for file in sorted(files):
        if file.name.startswith("."):
            if _unused_s(file) > LIMIT_S:  # nobody fetches for longer
                yield _file("part of an image", file)
        elif wanted is not None and file.name not in wanted and _is_own(record_of(file)):
            yield _file("image", file, record_of(file))


def containers(scratch: Path) -> Iterator[Leftover]:
    """Containers of enroot on this machine that no run holds."""
    folder = private_folder(scratch)
    if not _is_own(folder):
        return
    for name in sorted(_enroot_names()):
        lock = folder / f"{name}.lock"
        if lock.is_file() and is_free(lock):
            yield Leftover(
                what="container",
                where=name,
                unused_s=_unused_s(lock),
                size=None,
                remove=partial(_remove_container, lock),
            )


def locks(scratch: Path) -> Iterator[Leftover]:
    """Locks that nobody holds, with their marks, of containers on this machine that are gone, and of images."""
    folder = private_folder(scratch)
    if not _is_own(folder):
        return
    names = _enroot_names()
    for lock in sorted(folder.glob("*.lock")):
        unknown = shutil.which("enroot") is None and lock.with_suffix(".made").exists()
        if lock.stem not in names and not unknown and is_free(lock):
            yield Leftover(
                what="lock", where=str(lock), unused_s=_unused_s(lock), size=0, remove=partial(_remove_lock, lock)
            )


def _wanted_images(runs: Path) -> set[str] | None:
    """Names of the image files of runs that are not over; None where those of one are not known."""
    found = set()
    for folder in (runs, *(runs / name for name in SHORT_JOBS)):
        for one in listed(folder):
            if one.over:
                continue
            try:
                image = found_image(read_experiment(one.run.config).container)
            except (TdppError, OSError):
                return None
            found |= set() if image is None else {image.name}
    return found


def _never_started(run: RunDir) -> bool:
    verdict = verdict_without_plan(run)
    return verdict is not None and verdict.state in (State.lost, State.stopped)


def _run(what: str, run: RunDir, unneeded: Callable[[RunDir], bool]) -> Leftover:
    def remove() -> None:
        with launching(run):  # nobody begins to launch it meanwhile
            if not unneeded(run):
                raise LaunchError("has been started meanwhile")
            shutil.rmtree(run.path)
        for link in run_folders.entries(run.runs / run_folders.BY_JOB):
            if link.is_symlink() and Path(os.path.normpath(link.parent / link.readlink())) == run.path:
                link.unlink(missing_ok=True)
        with suppress(OSError):  # other runs of the name are there
            run.path.parent.rmdir()

    files = [path for path in run.path.rglob("*") if not path.is_symlink()]
    return Leftover(
        what=what,
        where=str(run.path),
        unused_s=_unused_s(run.path),
        size=sum(path.stat().st_size for path in files if path.is_file()),
        remove=remove,
    )


def _file(what: str, file: Path, *others: Path) -> Leftover:
    def remove() -> None:
        for path in (file, *others):
            path.unlink(missing_ok=True)

    return Leftover(what=what, where=str(file), unused_s=_unused_s(file), size=file.lstat().st_size, remove=remove)


def _remove_container(lock_file: Path) -> None:
    def remove() -> None:
        done = _enroot("remove", "-f", lock_file.stem)
        if done.returncode:
            raise LaunchError(f"enroot remove: {done.stderr.strip() or done.returncode}")

    _remove_lock(lock_file, remove)


def _remove_lock(lock_file: Path, first: Callable[[], None] = lambda: None) -> None:
    """Removes a lock and its mark once `first` is done; who waits for the lock then takes a new one."""
    with FileLock(lock_file) as lock:
        if not lock.try_take(fcntl.LOCK_EX):
            raise LaunchError("a run uses it now")
        first()
        lock_file.with_suffix(".made").unlink(missing_ok=True)
        lock_file.unlink(missing_ok=True)


def _enroot_names() -> set[str]:
    """Lists all containers of this user; none where there is no enroot."""
    if shutil.which("enroot") is None:
        return set()
    done = _enroot("list")
    if done.returncode:
        raise LaunchError(f"enroot list: {done.stderr.strip() or done.returncode}")
    return set(done.stdout.split())


def _enroot(*words: str) -> subprocess.CompletedProcess[str]:
    with reworded(LaunchError, f"enroot {' '.join(words)}: ", of=(OSError, subprocess.TimeoutExpired)):
        return captured(["enroot", *words], ENROOT_S)


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _unused_s(path: Path) -> float:
    """Since it was read or written, as far as its file system notes the first; of a link since it was made."""
    state = path.lstat()
    read = state.st_atime if path.is_file() else 0.0
    return max(0.0, time.time() - max(state.st_mtime, read))
