"""Watching a run to its end, and ending it when the watcher has to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from conf.run_folder.log_lines import for_people, is_evaluation_line, is_iteration_line, pieces
from conf.run_folder.run_files import opened
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.control.notify import notify_end_if_possible
from launch.control.stop import stop
from launch.errors import LaunchError
from launch.files.records import Submitted
from launch.files.run_files import read_run_files
from launch.machine import processes
from launch.node.worker_command import GRACE_S
from launch.observe.look import observe
from launch.screen import LOCAL_S, SLURM_S

LINE_S = 0.2
"""Between two looks at the logs."""
LOOK_S = 2.0
"""Between two looks at the processes, which cost more."""
PART_BYTES = 4 << 20
"""How many bytes of a log are read at once."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler: TypeAlias = Callable[[int, FrameType | None], None]


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    """Has `handler` take what ends a command within the block; signals that are ignored (nohup) stay so."""
    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    for signum, was in before.items():
        if was is not signal.SIG_IGN:
            signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, was in before.items():
            signal.signal(signum, was)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt too, as SIGINT does."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def finishing() -> Iterator[None]:
    """What is in here is finished before Ctrl-C, SIGTERM or SIGHUP interrupt; a second one does not wait for it."""
    noted: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(signum)

    with _handled(note):
        yield
    if noted:
        raise KeyboardInterrupt


def follow(run: RunDir) -> None:
    """Prints lines of iterations and evaluations on stderr as they come, until no process of the run is left.

    If anything ends this early (Ctrl-C, a closed terminal), the run is stopped first.
    """
    with stopped_if_interrupted(run):
        _watch(run)
        tidy(run)
    notify_end_if_possible(run)


@contextmanager
def stopped_if_interrupted(run: RunDir) -> Iterator[None]:
    """If anything ends the block early (Ctrl-C, a closed terminal), the run is stopped first. Raises LaunchError:
    somebody has deleted its folder."""
    submitted = run.read(run.jobs, Submitted)
    try:
        yield
    except BaseException as error:
        if run.plan.exists():
            give_up(run)
            raise
        if submitted is not None:
            processes.terminate(submitted.token, GRACE_S)
        raise LaunchError(
            f"{run.path} was deleted while the run was active; its processes on this machine were stopped, and "
            "nothing of it is left; launch it again"
        ) from error


def stop_if_active(run: RunDir) -> None:
    """Stops a run that was interrupted before `follow` could do so; no signal interrupts it any more."""
    _ignore_signals()
    if not observe(run).over:
        give_up(run)


def give_up(run: RunDir) -> None:
    """Stops a run whose watcher ends; no signal interrupts it any more."""
    _ignore_signals()
    _say(f"stopping {run.name} …")
    stop(run)
    notify_end_if_possible(run)
    _say(f"stopped {run.name}; none of its processes is left")


def _ignore_signals() -> None:
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)


def _watch(run: RunDir) -> None:
    logs: dict[str, Log] = {}
    next_look = time.monotonic()
    over = False
    while not over:
        time.sleep(LINE_S)
        seen = read_run_files(run)
        over = seen.settled
        if not over and time.monotonic() > next_look:
            over = observe(run).over
            next_look = time.monotonic() + LOOK_S
        for name, state in seen.states.items():
            # A run that is started again has the ends and the logs of its earlier starts.
            if state is not None and state.of >= seen.submitted.first:
                logs.setdefault(name, Log(run.node_out(name), state.out_begin))
        for log in logs.values():
            while lines := log.new_lines():
                for piece in (piece for line in lines for piece in pieces(line)):
                    if is_iteration_line(piece) or is_evaluation_line(piece):
                        print(visible(for_people(piece)), file=sys.stderr, flush=True)


def wait(run: RunDir, timeout_s: float | None = None) -> bool:
    """Whether a run is over, within `timeout_s` seconds where they are given. Ending the wait does not end the run."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while not (seen := observe(run)).over:
        if until is not None and time.monotonic() > until:
            return False
        time.sleep(SLURM_S if seen.jobs else LOCAL_S)
    tidy(run)
    notify_end_if_possible(run)
    return True


def tidy(run: RunDir) -> None:
    """The last agents and submitit's controller are on their way out; what is not, is ended."""
    submitted = run.read(run.jobs, Submitted)
    if submitted is not None and processes.wait_until_gone(submitted.token, GRACE_S):
        processes.terminate(submitted.token, 1.0)


class Log:
    """A text file that grows, and may be begun anew."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        self._offset = begin

    def new_lines(self) -> list[str]:
        """The next lines completed since the last call, some megabytes of them; none while there is no file. Raises
        RunFolderError: it is not a regular file, or cannot be read."""
        text = self._read()
        whole = text[: text.rfind(b"\n") + 1] or (text if len(text) == PART_BYTES else b"")
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()

    def rest(self) -> str:
        """The last line, as long as nothing has ended it."""
        return self._read().decode(errors="replace")

    def _read(self) -> bytes:
        try:
            with opened(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                return file.read(PART_BYTES)
        except FileNotFoundError:
            return b""


def _say(text: str) -> None:
    """A message to somebody who may have closed the terminal."""
    try:
        print(visible(text), file=sys.stderr, flush=True)
    except OSError:
        return
