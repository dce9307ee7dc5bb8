"""The processes of a run on this machine.

Every process that belongs to a run has `TDPP_RUN_TOKEN=<token>` in the environment it was started with, which no
other process has and which it cannot lose; a process id alone could by now be somebody else's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from conf.run_folder.run_files import appended
from launch.errors import LaunchError
from megatron_ext.contract.worker import NODE_RANK, START, TOKEN, die_with_parent

if TYPE_CHECKING:
    from conf.run_folder.rundir import RunDir

OF_A_RUN = (TOKEN, NODE_RANK, START)
"""Variables by which the processes of a run are found, and ended; whoever tells of its end has none of them."""
_MARK = f"{TOKEN}=".encode()
_KILL_ROUNDS = 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str | None:
    """Which start of this machine it is; no other machine has the same. None where the kernel does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None


def own_umask() -> int:
    """This process's, which can only be read by setting it."""
    os.umask(current := os.umask(0o077))
    return current


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """A variable of this process's environment, for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def find(token: str, node_rank: int | None = None) -> set[int]:
    """Ids of the run's living processes, or only of a node's worker; without the caller itself.

    Only root sees those of other users.
    """
    wanted = {f"{TOKEN}={token}".encode()} | (set() if node_rank is None else {f"{NODE_RANK}={node_rank}".encode()})
    own, user = os.getpid(), os.geteuid()
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        try:
            seen = user in (0, entry.stat().st_uid)
            if seen and wanted.issubset(Path(entry.path, "environ").read_bytes().split(b"\0")):
                found.add(int(entry.name))
        except OSError:  # ended meanwhile, or a process that hides its environment: none of ours does
            continue
    return found


def tokens_of(paths: Set[str]) -> set[str]:
    """Returns the tokens of runs whose processes, as far as they can be seen, were given one of these paths."""
    found = set()
    for entry in os.scandir("/proc"):
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if any(os.path.realpath(word) in map(str.encode, paths) for word in words if word.startswith(b"/")):
                environment = Path(entry.path, "environ").read_bytes().split(b"\0")
                found |= {word.partition(b"=")[2].decode() for word in environment if word.startswith(_MARK)}
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def is_of(token: str, pid: int) -> bool | None:
    """Whether a process is one of the run's; None for one that is not to be seen from here."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:  # another user's
        return False
    except OSError:
        return None
    return f"{TOKEN}={token}".encode() in environment.split(b"\0") if environment else None


def first_of_step(token: str, node_rank: int, srun: int) -> int | None:
    """Returns the process that Slurm started for a node's worker that `srun` runs in a step. None until it handles
    SIGTERM: before, it may be part of what makes its container."""
    living = find(token, node_rank) | {srun}
    started = (pid for pid in living if (parent := _stat(pid, 1)) is not None and int(parent) not in living)
    return next((pid for pid in started if pid != srun and catches(pid, signal.SIGTERM)), None)


def is_stopped(pid: int) -> bool:
    """Whether somebody (SIGSTOP, Ctrl-Z), or a debugger, has stopped a process: it lives, and does nothing."""
    return _stat(pid, 0) in ("T", "t")


def _stat(pid: int, field: int) -> str | None:
    """State (0), parent (1) and so on of a process, as in proc_pid_stat(5) behind its name; None for one that ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[field]


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, so that it would neither miss it nor die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:  # ended meanwhile
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def wait_until_gone(token: str, seconds: float, node_rank: int | None = None) -> set[int]:
    """Waits until what `find` finds is gone, at most `seconds`; returns what still lives."""
    until = time.monotonic() + seconds
    while (living := find(token, node_rank)) and time.monotonic() < until:
        time.sleep(0.05)
    return living


def terminate(token: str, grace_s: float) -> set[int]:
    """Asks every process of the run to end (SIGTERM), kills those that live on after `grace_s`.

    Returns the ids of the processes that it ended, one way or the other.

    Raises:
        LaunchError: some could not even be killed.
    """
    ended = find(token)
    send(ended, signal.SIGTERM)
    wait_until_gone(token, grace_s)
    return ended | kill(token)


def kill(token: str, node_rank: int | None = None) -> set[int]:
    """Kills what `find` finds (SIGKILL), and returns when it is gone: the ids. Raises LaunchError: some live on."""
    killed: set[int] = set()
    living = find(token, node_rank)
    for _ in range(_KILL_ROUNDS):
        if not living:
            return killed
        killed |= living
        send(living, signal.SIGKILL)  # again each round: one of them may have started another meanwhile
        living = wait_until_gone(token, 1.0, node_rank)
    raise LaunchError(f"processes {sorted(living)} of the run cannot be killed; inspect them with ps")


def captured(
    command: Sequence[str],
    timeout_s: float | None,
    *,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with what it is given on stdin; returns what it printed.

    Raises:
        OSError: it cannot be started.
        TimeoutExpired: it takes longer; it is killed.
    """
    return subprocess.run(
        command,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        check=False,
        env=environment,
        cwd=cwd,
        start_new_session=True,  # a terminal sends Ctrl-C to all of a session's foreground group
    )


def helper(
    run: RunDir,
    node: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    piped: bool = False,
    outlives: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a module of tdpp beside a node's worker (`begin_helper`), which prints into the node's stderr.

    Args:
        words: the module's name and its arguments.
        environment: all of its variables but PYTHONPATH.
        piped: whether it waits for the end of its stdin.
        outlives: whether it goes on when this process ends.
    """
    from launch.machine.provenance import path_of_agents  # most commands start none

    with appended(run.node_err(node)) as err:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *words],
            env={**environment, "PYTHONPATH": path_of_agents()},
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
            preexec_fn=None if outlives else begin_helper,
        )


def begin_helper() -> None:
    """Prepares a process that an agent starts beside its worker: it is killed with the agent, and lives through the
    signals that announce an end to every process of the job."""
    die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    """Sends a signal to those of the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue
