"""Tries one command: it may end well, or with one message and an exit code; anything else is a fault of ours.

Each trial is a process of its own, forked from one that has imported the commands already, so that it is held to its
limits wherever it hangs, and leaves nothing behind for the next one.
"""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import launch.control.submit
from launch.cli import main
from launch.commands import COMMANDS
from launch.errors import LaunchError

CPU_S = 5
WALL_S = 60
MEMORY_BYTES = 2 * 2**30
"""Of address space, beside what the process that runs the tests has: hours of tests leave up to 3 GiB in it."""
FILE_BYTES = 2**28
LONGEST = 4500
"""Characters of a message that somebody still reads (conf/visible.py), and of what stands before it."""
CRASHED = 70
"""The exit code of a trial that ended with an exception."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]")
_DRY = ("dry_run=true", "--cfg")
"""Words that say that nothing is written."""


class Outcome(StrEnum):
    success = "success"
    message = "message"
    """And an exit code other than 0."""
    traceback = "traceback"
    hang = "hang"
    """More than 5 s of CPU, or a minute in all."""
    killed = "killed"
    """By another signal."""
    silent = "silent"
    """Failed without a word."""
    long = "long"
    """Failed with more words than anybody reads."""
    control = "control"
    """Control characters in a message: a terminal obeys them."""
    wrote = "wrote"
    """A dry run that left something."""


GOOD = (Outcome.success, Outcome.message)


@dataclass(frozen=True, kw_only=True)
class Trial:
    argv: Sequence[str]
    """What follows `tdpp`."""
    outcome: Outcome
    printed: str
    """The end of stdout and stderr."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for what a trial reads; the trial's working folder."""
    with tempfile.TemporaryDirectory(prefix="tdpp-fuzz-") as folder:
        (work := Path(folder) / "work").mkdir()
        yield work
        for path in work.rglob("*"):  # what a trial made unreadable
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)


def ready() -> None:
    """Imports what trials would else import one by one."""
    for command in COMMANDS:
        import_module(f"launch.commands.{command}")
    for name in (
        "fasop.search.search",
        "fasop.search.front_search",
        "fasop.search.run",
        "fasop.search.inputs",
        "fasop.tables.plans",
        "data_prep.indexed.check",
    ):
        import_module(name)


def attempt(argv: Sequence[str], work: Path) -> Trial:
    """Runs `tdpp <argv>` in the folder `work`, whose neighbours (home, output) are made here."""
    home, out, err = (work.parent / name for name in ("home", "out", "err"))
    home.mkdir(exist_ok=True)
    before = _listing(work)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(argv, work, home, out, err)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that it has left
    told = err.read_text(encoding="utf-8", errors="replace")
    said = out.read_text(encoding="utf-8", errors="replace")
    dry = any(word in argv for word in _DRY)
    outcome = _outcome(status, told, said, changed=dry and _listing(work) != before)
    return Trial(argv=argv, outcome=outcome, printed="\n".join(filter(None, (said[-1000:], told[-6000:]))))


def _run(argv: Sequence[str], work: Path, home: Path, out: Path, err: Path) -> NoReturn:
    """In the child; it ends with the command."""
    code = CRASHED
    try:
        os.setsid()
        os.chdir(work)
        os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
        for number, path, flags in ((0, Path(os.devnull), os.O_RDONLY), (1, out, _WRITE), (2, err, _WRITE)):
            os.dup2(os.open(path, flags, 0o600), number)
        sys.stdin, sys.stdout = (open(number, mode, closefd=False) for number, mode in enumerate("rw"))  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115  (as Python opens it)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        memory = MEMORY_BYTES + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        for number in (signal.SIGXCPU, signal.SIGALRM):  # where it hung is printed, then the signal ends it
            signal.signal(number, signal.SIG_DFL)
            faulthandler.register(number, sys.stderr, chain=True)
        signal.alarm(WALL_S)
        launch.control.submit._start = _refused
        code = main(list(argv))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _refused(*_: object, **__: object) -> NoReturn:
    """Nothing is started: a damaged run may look as if it could go on."""
    raise LaunchError("the fuzzer starts nothing")


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _outcome(status: int, told: str, said: str, changed: bool) -> Outcome:
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM)
        return Outcome.hang if hung else Outcome.killed
    code = os.WEXITSTATUS(status)
    if code == CRASHED or "Traceback (most recent call last)" in told:
        return Outcome.traceback
    if changed:
        return Outcome.wrote
    if _CONTROL.search(told.replace("\r", "")):
        return Outcome.control
    if code == 0:
        return Outcome.success
    if not (told.strip() or said.strip()):
        return Outcome.silent
    return Outcome.long if max(map(len, told.splitlines()), default=0) > LONGEST else Outcome.message


def _listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))
