"""Machines of the test cluster: each with a network, a host name, a process tree and a /dev/shm of its own.

The kernel clears up: a machine's first process dies with this one (PR_SET_PDEATHSIG), with it all processes of its
PID namespace, with them its network and its mounts. Make machines in the main thread: the signal comes when the thread
that made them ends. Who may not make namespaces gets processes of this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from tests.support.slurm import reap

UNSHARE = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts")
ALL = ("--pid", "--mount", "--uts", "--net", "--root", "--wd", "--")
# dash reaps every orphan while it waits
INIT = "sleep infinity & echo up; wait"
SETUP = 'hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs tmpfs /dev/shm; ip link set lo up'


class Machine(Protocol):
    """Where daemons run."""

    def spawn(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a daemon that stays in the foreground."""

    def guests(self) -> dict[int, str]:
        """The processes that no `spawn` started, but what runs in the machine did: command lines by pid."""

    def kill(self) -> None:
        """Ends every process of the machine at once, and returns when they are gone."""


@cache
def may_isolate() -> bool:
    """Whether the kernel lets us make machines with namespaces of their own."""
    return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode == 0


class Isolated:
    """A machine in namespaces; needs root. `pid` is its first process, as seen from here."""

    def __init__(self, host: str, hosts: Path) -> None:
        self._unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *UNSHARE, "sh", "-c", INIT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"up\n"
        parents = reap.parents()
        (self.pid,) = _children([self._unshare], parents)
        (self._sleep,) = (pid for pid, parent in parents.items() if parent == self.pid)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.call("sh", "-ec", SETUP, "setup", host, str(hosts))

    def call(self, *argv: str, stdin: str = "") -> None:
        """Runs a command here, as any process of the machine would."""
        subprocess.run([*self._enter, *ALL, *argv], input=stdin, text=True, check=True)

    def ip(self, commands: str) -> None:
        """`ip -batch` on the machine's network; pids are those outside, so that links can lead to other machines."""
        subprocess.run([*self._enter, "--net", "ip", "-batch", "-"], input=commands, text=True, check=True)

    def spawn(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._daemons.append(_daemon([*self._enter, *ALL, *argv], log, env))
        return self._daemons[-1]

    def guests(self) -> dict[int, str]:
        parents = reap.parents()
        all_of_them = reap.descendants({self.pid, *(daemon.pid for daemon in self._daemons)}, parents)
        return _command_lines(all_of_them - {self._sleep} - _children(self._daemons, parents))

    def kill(self) -> None:
        os.kill(self._sleep, signal.SIGKILL)  # so that INIT ends, and with it all
        self._unshare.wait()
        for daemon in self._daemons:
            daemon.wait()

    @property
    def _enter(self) -> tuple[str, ...]:
        return "nsenter", "--target", str(self.pid)


class Plain:
    """No machine at all: its processes run here, and are known by the process that started them."""

    def __init__(self) -> None:
        self._daemons: list[subprocess.Popen[bytes]] = []

    def spawn(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        until_we_end = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-I", reap.__file__, *argv]
        self._daemons.append(_daemon(until_we_end, log, env))
        return self._daemons[-1]

    def guests(self) -> dict[int, str]:
        parents = reap.parents()
        found: set[int] = set()
        for daemon in self._daemons:
            # The first is the daemon itself, the others are orphans.
            found |= reap.descendants({daemon.pid}, parents) - {min(_children([daemon], parents), default=0)}
        return _command_lines(found)

    def kill(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait()


def _daemon(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Deaf to Ctrl-C in the terminal of the tests, which end it in order."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env), start_new_session=True
        )


def _children(processes: Iterable[subprocess.Popen[bytes]], parents: Mapping[int, int]) -> set[int]:
    above = {process.pid for process in processes}
    return {pid for pid, parent in parents.items() if parent in above}


def _command_lines(pids: Iterable[int]) -> dict[int, str]:
    """Those of living processes; zombies have none."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if line := Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
