"""Files of which this user can be sure: nobody else could have put them there, or another file in their place.

Who may write to a folder may rename what lies in it. So what counts is every folder from the root down, and each is
looked at through an open handle of it: what a name leads to cannot change between the look and the next step.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.errors import reworded
from launch.errors import LaunchError
from launch.files.locks import name_of

MOST_LINKS = 40
"""In one path, as in Linux itself."""
MOST_BYTES = 1 << 26
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class OwnFolder:
    """A folder that is this user's own, as `own_folder` has opened it."""

    path: Path
    handle: int

    def read(self, name: str) -> bytes:
        """The content of a file in it; raises LaunchError unless it is a regular file that is this user's own, too."""
        path = self.path / name
        try:
            handle = os.open(name, _FILE, dir_fd=self.handle)
        except OSError as error:
            raise _unopened(path, error) from error
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _refused(path, "is not a regular file")
            if (why := _not_own(found)) is not None:
                raise _refused(path, why)
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise _refused(path, f"has more than {MOST_BYTES} bytes")
        return content


def read_own_file(path: Path) -> bytes:
    """The content of a file that is this user's own, whatever the folders above it are. Raises LaunchError: it is
    missing, a link, somebody else's, or others can write to it."""
    handle = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return OwnFolder(path.parent, handle).read(path.name)
    finally:
        os.close(handle)


@contextmanager
def own_folder(path: Path, below: str = "", *, group: bool = False) -> Iterator[OwnFolder]:
    """The folder of a run, or that of a name in it, `below`, for as long as it is open.

    Args:
        group: whether the run's group is trusted, too (runs_mode=group): it may write to the run's folder, and to those
            above that are the group's.

    Raises:
        LaunchError: somebody else owns one of the folders, or may write to it, or rename what leads to it.
    """
    with closing(_Walk()) as walk:
        walk.go(path)
        run = walk.seen[-1][1]
        if (why := _not_own(run, group=group)) is not None:
            raise _refused(path, why)
        require_safe(walk, run.st_gid if group else None)
        if below:
            walk.enter(below)
            if (why := _not_own(walk.seen[-1][1])) is not None:
                raise _refused(walk.at, why)
        yield OwnFolder(path / below, walk.handle)


def require_own_file(path: Path) -> None:
    """Raises LaunchError unless a file is this user's own, whatever the folders above it are."""
    try:
        found = path.lstat()
    except OSError as error:
        raise _refused(path, f"is missing ({error.strerror})") from error
    if (why := _not_own(found)) is not None:
        raise _refused(path, why)


def require_place(runs: Path, name: str, *, group: bool) -> int | None:
    """Raises LaunchError where others could replace the runs of a name that this user makes. What is not there yet, or
    cannot be reached, is looked at when it has been made. Returns the group that is trusted, with `group`: that of the
    folder of runs if it gives it to what is made there, else the user's own."""
    with closing(_Walk()) as walk:
        walk.go(runs / name, missing=True)
        trusted = None
        if group:
            shared = _Walk()
            with closing(shared):
                shared.go(runs, missing=True)
                found = shared.seen[-1][1]
            trusted = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
        try:
            require_safe(walk, trusted)
        except LaunchError as error:
            raise LaunchError(f"runs_dir={runs}, name={name}: {error}") from None
        return trusted


def require_own_folder(path: Path, *, make: bool) -> None:
    """Raises LaunchError unless nobody else may write to a folder, or put another in its place. `make`: whether it is
    made, with mode 0700, if it is not there; else that is no fault."""
    if make:
        with reworded(LaunchError, f"{path} cannot be created (", ")"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(_Walk()) as walk:
        walk.go(path, missing=not make)
        _, found = walk.seen[-1]
        if walk.whole and (why := _not_own(found)) is not None and not _is_private_folder(found):
            raise LaunchError(f"{path} {why}")
        require_safe(walk, None)


def require_not_everybodys(path: Path) -> None:
    """Raises LaunchError where any user may write to a file or folder, put another in its place, or has done so where
    every user may. A folder of software that some other user maintains, or a group, is none of these."""
    with closing(_Walk()) as walk:
        walk.go(path, missing=True)
        open_to_all = False
        for at, found in walk.seen:
            if open_to_all and found.st_uid not in (0, os.geteuid()):
                raise LaunchError(
                    f"{at} belongs to user {name_of(found.st_uid)}, in a folder where everybody may create files"
                )
            if stat.S_ISLNK(found.st_mode):
                continue
            open_to_all = bool(found.st_mode & stat.S_IWOTH)
            last = walk.whole and at == walk.seen[-1][0]
            if open_to_all and (last or not found.st_mode & stat.S_ISVTX):
                raise LaunchError(f"{at} can be written by everybody (mode {stat.S_IMODE(found.st_mode):03o})")
        if open_to_all and not walk.whole:
            raise LaunchError(f"{path} is missing, in a folder where everybody may create it")


class _Walk:
    """Walks from the root down, through handles; each folder and link on the way is `seen`."""

    def __init__(self) -> None:
        self.handle = os.open("/", _FOLDER)
        self.at = Path("/")
        self.seen: list[tuple[Path, os.stat_result]] = [(self.at, os.fstat(self.handle))]
        self.whole = True
        """Whether it has come to the end of a path, whose last part may be a file."""
        self._links = 0

    def close(self) -> None:
        os.close(self.handle)

    def go(self, path: Path, *, missing: bool = False) -> None:
        """Goes to a folder; with `missing` as far as there is one. Links are followed, and are looked at themselves."""
        left = [word for word in reversed(path.absolute().parts) if word != "/"]
        while left:
            word = left.pop()
            try:
                found = os.stat(word, dir_fd=self.handle, follow_symlinks=False)
                if missing and not stat.S_ISLNK(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                    self.seen.append((self.at / word, found))
                    self.whole = not left
                    return
                if not stat.S_ISLNK(found.st_mode):
                    self._take(os.open(word, _FOLDER, dir_fd=self.handle), self._of(word))
                    continue
                target = os.readlink(word, dir_fd=self.handle)
            except OSError as error:
                if missing:
                    self.whole = False
                    return
                raise _unopened(self.at / word, error) from error
            self._links += 1
            if self._links > MOST_LINKS:
                raise _refused(path, "leads through too many links")
            self.seen.append((self.at / word, found))
            left += [part for part in reversed(Path(target).parts) if part != "/"]
            if target.startswith("/"):
                self._take(os.open("/", _FOLDER), Path("/"))

    def enter(self, word: str) -> None:
        """A folder that lies in this one, and is no link."""
        try:
            handle = os.open(word, _FOLDER, dir_fd=self.handle)
        except OSError as error:
            raise _unopened(self.at / word, error) from error
        self._take(handle, self._of(word))

    def _of(self, word: str) -> Path:
        return self.at.parent if word == ".." else self.at / word

    def _take(self, handle: int, at: Path) -> None:
        os.close(self.handle)
        self.handle, self.at = handle, at
        self.seen.append((at, os.fstat(handle)))


def require_safe(walk: _Walk, trusted: int | None) -> None:
    """Raises LaunchError where others could rename what lies on the way; `trusted` is a group that may."""
    open_to_all = False
    for path, found in walk.seen:
        mode = stat.S_IMODE(found.st_mode)
        of_group = trusted is not None and found.st_gid == trusted
        unknown = not open_to_all and found.st_uid == _unknown_user()
        open_to_all = bool(mode & stat.S_IWOTH) and not stat.S_ISLNK(found.st_mode)
        if found.st_uid not in (0, os.geteuid()) and not of_group and not unknown:
            raise LaunchError(
                f"{path} belongs to user {name_of(found.st_uid)}, who could replace the runs in it, and with them what "
                f"their jobs start; choose another name= or a runs_dir= of your own"
            )
        if stat.S_ISLNK(found.st_mode) or mode & stat.S_ISVTX:  # there only its owner renames what is his
            continue
        if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not of_group and not _is_private(found.st_gid)):
            raise LaunchError(
                f"{path} can be written by others (mode {mode:03o}), who could replace the runs in it, and with them "
                f"what their jobs start; protect it (chmod +t, or chmod go-w), choose another runs_dir=, or trust its "
                f"group with runs_mode=group"
            )


def _unknown_user() -> int | None:
    """Whose everything looks that is root's, as in a container without root's rights: its user namespace (see
    user_namespaces(7)) knows few users, and root is none of them. None anywhere else."""
    outside = Path("/proc/self/uid_map").read_text(encoding="ascii").split()[1::3]
    if "0" in outside:
        return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone: of the user's name and without further members, as pam_umask(8) has it."""
    try:
        user = pwd.getpwuid(os.geteuid())
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _is_private_folder(found: os.stat_result) -> bool:
    """Whether a folder's group may write to it, and is this user's alone."""
    own = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_IWOTH
    return own and _is_private(found.st_gid)


def _not_own(found: os.stat_result, *, group: bool = False) -> str | None:
    """Why something is not this user's alone; with `group` its group may write to it."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}, whose job this is"
    if found.st_mode & (0o002 if group else 0o022):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):03o})"
    return None


def _unopened(path: Path, error: OSError) -> LaunchError:
    """What is missing is no sign of somebody else."""
    if isinstance(error, FileNotFoundError):
        return LaunchError(f"{path} is missing, which every launch makes; launch the run again")
    return _refused(path, f"cannot be opened ({error.strerror})")


def _refused(path: Path, why: str) -> LaunchError:
    return LaunchError(
        f"{path} {why}, so somebody else could have put code there; nothing was started. Check that it holds what you "
        f"launched, then remove others' write permission (chmod -R go-w), or launch again; with runs_mode=group the "
        f"group of a new run's folder may write there"
    )
