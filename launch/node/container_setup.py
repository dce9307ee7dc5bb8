"""Makes a run's container ready on one node: brings the image file, creates the container, holds it for the run.

`Setup.step` never waits: it looks what has happened and returns, so that the caller stays in charge of signals, of
other nodes that fail and of the run's end.

On the node's own disk, in <scratch>/tdpp-<user id>/, lie for each container a lock and a mark. Whoever makes the
container holds the lock alone; a run that uses it shares the lock until it ends, so that nobody makes it anew under its
feet. The mark is written when the container is complete, and names the run that made it: a container without one is
what a killed process left behind. Processes that make it inherit the lock: it is free when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from conf.errors import reworded
from conf.schema.containers import ContainerKind, ImageReference
from conf.visible import span
from launch.errors import LaunchError
from launch.files.locks import FileLock
from launch.machine import docker
from launch.machine.container_runtimes import RUNTIMES, Docker, Enroot, RunContainer, container_name
from launch.node.image_file import check_digest, check_found, expected, write_record
from megatron_ext.contract.files import write_atomic

LIMIT_S = 2 * 3600.0
"""For one command, and for one wait for another process or node."""
GRACE_S = 3.0
"""Between asking a command to end, which then tidies up, and killing it."""
_LAST_LINES = 5
"""How many lines of a failed command's stderr are shown."""

Doing = Generator[str, None, None]
"""Yields, each time it would wait, what it waits for."""


def private_folder(scratch: Path) -> Path:
    """Where this user's locks and marks lie on a node; it need not be there."""
    return scratch / f"tdpp-{os.getuid()}"


def check_program(kind: ContainerKind) -> None:
    """Raises LaunchError if this machine does not have the runtime."""
    program = RUNTIMES[kind].program
    if shutil.which(program) is None:
        raise LaunchError(
            f"container.kind={kind}: {program} is not on the PATH of {socket.gethostname()}; install it, or "
            f"choose another container, such as container=none"
        )


class Setup:
    """The container of a run on this node: `step` until it is ready, `close` when the run has ended or is given up."""

    def __init__(self, container: RunContainer, node_rank: int) -> None:
        self._container = container
        self._node_rank = node_rank
        self._name: str | None = None
        self._made = False
        self._held: _Lock | None = None
        self._steps = self._prepare()
        self.image: str | None = None
        """The ID of docker's image, once it is ready."""
        self.doing: str | None = "starting"
        """What it waits for; None once the container is ready."""

    def step(self) -> bool:
        """Whether the container is ready; if not, call again soon. Raises LaunchError: it cannot be made ready."""
        self.doing = next(self._steps, None)
        return self.doing is None

    @property
    def name(self) -> str:
        """The container's, once it is ready."""
        assert self._name is not None
        return self._name

    def close(self) -> None:
        """Ends what still runs, and lets go of the container."""
        self._steps.close()
        if self._held:
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _prepare(self) -> Doing:
        container, runtime = self._container, self._container.runtime
        check_program(container.kind)
        if isinstance(runtime, Docker):
            self._name = runtime.name(container, self._node_rank)
            yield from self._pull(self._name)
            return
        if container.file is None:
            self._name = container_name(str(container.image), str(container.image), socket.gethostname())
            return
        yield from self._bring(container.file)
        if isinstance(container.image, ImageReference):
            check_found(container.file)
        state = container.file.stat()
        apart = [str(container.file), state.st_size, state.st_mtime_ns, socket.gethostname()]
        apart += [] if container.digest is None else [container.digest]
        self._name = container_name(container.file.stem, *apart)
        if isinstance(runtime, Enroot):
            yield from self._create(self._name, runtime)
        else:
            yield from self._verify(container.file)

    def _pull(self, name: str) -> Doing:
        """Has docker bring the image if it is missing. Of an earlier start nothing may have the container's name."""
        container = self._container
        if (found := (yield from self._tried(docker.image_id(str(container.image))))) is None:
            yield from self._run(docker.pull(str(container.image)), None)
            found = yield from self._run(docker.image_id(str(container.image)), None)
        self.image = found.strip()
        if container.digest not in (None, self.image):
            raise LaunchError(
                f"container.image={container.image} on {socket.gethostname()} has the ID {self.image}, but "
                f"container.digest={container.digest}; it was not used. Put the right image on every node, or correct "
                f"the digest"
            )
        yield from self._tried(docker.removal(name))

    def _tried(self, command: Sequence[str]) -> Generator[str, None, str | None]:
        """What a command writes to stdout; None if it fails."""
        try:
            return (yield from self._run(command, None))
        except LaunchError:
            return None

    def _bring(self, file: Path) -> Doing:
        """Node 0 brings the image's file if it is missing; it appears under its name only when complete."""
        container, host = self._container, socket.gethostname()
        if file.is_file():
            return
        if isinstance(container.image, Path):
            raise LaunchError(f"container.image={file}: no such file on {host}; put it where all nodes see it")
        if self._node_rank != 0:
            until = time.monotonic() + LIMIT_S
            while not file.is_file():
                yield _bounded(f"{file}, which node 0 fetches", until)
            return
        _make_folder(file.parent, f"container.image_dir={file.parent}")
        with _Lock(self._private_folder() / f"{container_name(file.stem, str(file))}.lock") as lock:
            yield from lock.take(fcntl.LOCK_EX)
            try:
                yield from self._make(file, file.with_name(f".{host}.{file.name}"), lock)
            except OSError as error:
                raise LaunchError(
                    f"container.image_dir={file.parent}: {error.filename or file} cannot be written on {host} "
                    f"({error.strerror}); choose a folder that all nodes see and you may write to, with room for images"
                ) from error

    def _make(self, file: Path, partial: Path, lock: _Lock) -> Doing:
        """Fetches or builds the image's file, unless another host has done so meanwhile; raises OSError, too."""
        container = self._container
        partial.unlink(missing_ok=True)  # of a process that was killed
        between_hosts = file.with_name(f".lock.{file.name}")
        with _Lock(between_hosts) as shared:
            with suppress(OSError):  # a file system without locks: each host makes its own, and the first one's is used
                yield from shared.take(fcntl.LOCK_EX)
            try:
                if file.is_file():
                    return
                builds = f"the build of {file.name} from container.recipe" if container.recipe else None
                yield from self._run(container.runtime.fetch(container, partial), lock, builds)
                partial.chmod(partial.stat().st_mode & ~0o022)
                digest = yield from self._digest(partial, lock)
                if not file.is_file():  # another node's may be in use already
                    partial.replace(file)
                    write_record(file, digest)
            finally:
                partial.unlink(missing_ok=True)
                between_hosts.unlink(missing_ok=True)

    def _verify(self, file: Path, lock: _Lock | None = None) -> Doing:
        """Raises LaunchError if the image file does not hold what it must."""
        if (wanted := expected(self._container, file)) is not None:
            check_digest(file, (yield from self._digest(file, lock)), wanted)

    def _digest(self, file: Path, lock: _Lock | None) -> Generator[str, None, str]:
        """SHA-256 of a file that may take minutes to read."""
        output = yield from self._run(["sha256sum", "--", str(file)], lock)
        return output.lstrip("\\").split()[0]  # a backslash says that the name is escaped

    def _create(self, name: str, runtime: Enroot) -> Doing:
        """Takes a share in the container, which it makes if it must: of a file that holds what it must."""
        assert self._container.file is not None
        folder = self._private_folder()
        mark = folder / f"{name}.made"
        self._held = lock = _Lock(folder / f"{name}.lock")
        until = time.monotonic() + LIMIT_S
        while True:
            yield from lock.take(fcntl.LOCK_SH)
            if self._is_wanted(mark) and (yield from self._exists(name, lock)):
                return
            if not lock.try_take(fcntl.LOCK_EX):  # another one makes it, or uses one that is not wanted
                yield _bounded(lock.busy, until)
                continue
            exists = yield from self._exists(name, lock)
            if not (exists and self._is_wanted(mark)):  # which it may be by now: the lock was free in between
                mark.unlink(missing_ok=True)
                yield from self._verify(self._container.file, lock)
                yield from self._run(runtime.create(self._container, name, anew=exists), lock)
                write_atomic(mark, self._container.run)
                self._made = True

    def _exists(self, name: str, lock: _Lock) -> Generator[str, None, bool]:
        return name in (yield from self._run(["enroot", "list"], lock)).split()

    def _is_wanted(self, mark: Path) -> bool:
        """Whether the container is whole, and as new as this run asks for."""
        if not mark.exists():
            return False
        return not self._container.reload or self._made or mark.read_text(encoding="utf-8") == self._container.run

    def _run(self, command: Sequence[str], lock: _Lock | None, called: str | None = None) -> Generator[str, None, str]:
        """Runs a command, which messages show as it is or as `called`, and returns what it wrote to stdout."""
        shown = called or shlex.join(command)
        until = time.monotonic() + LIMIT_S
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=[lock.file.fileno()] if lock else [],
            )
            try:
                while process.poll() is None:
                    yield _bounded(shown, until)
            finally:
                if process.returncode is None:
                    _end(process)
            if process.returncode:
                ended = f"{shown} {_ended(process.returncode)} on {socket.gethostname()}; its last output:"
                output = _text(err).strip().splitlines()[-_LAST_LINES:] or ["(nothing)"]
                raise LaunchError("\n  ".join([f"container.image={self._container.image}: {ended}", *output]))
            return _text(out)

    def _private_folder(self) -> Path:
        """Makes a folder on this node's disk, this user's own."""
        scratch = self._container.scratch
        folder = private_folder(scratch)
        _make_folder(folder, f"cluster.scratch={scratch}", private=True)
        if folder.lstat().st_uid != os.getuid():
            raise LaunchError(
                f"cluster.scratch={scratch}: {folder} on {socket.gethostname()} belongs to another user; choose "
                "another folder on the nodes' own disks"
            )
        return folder


class _Lock(FileLock):
    """One that can be waited for."""

    def take(self, how: int) -> Doing:
        """Shared or alone, in the place of what was held before."""
        until = time.monotonic() + LIMIT_S
        while not self.try_take(how):
            yield _bounded(self.busy, until)


def _bounded(what: str, until: float) -> str:
    if time.monotonic() > until:
        raise LaunchError(f"{socket.gethostname()} waited {span(LIMIT_S)} for {what} and gave up")
    return what


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the group of a process that is not waited for yet, so that its id is still its own."""
    until = time.monotonic() + GRACE_S
    os.killpg(process.pid, signal.SIGTERM)
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_folder(folder: Path, key: str, *, private: bool = False) -> None:
    with reworded(
        LaunchError,
        f"{key}: {folder} cannot be created on {socket.gethostname()} (",
        "); choose a folder that you may write to",
    ):
        folder.mkdir(mode=0o700 if private else 0o777, parents=not private, exist_ok=True)
