"""python reap.py COMMAND...: runs the command; when it ends, or on SIGTERM, everything that it ever started ends too.

Orphans become children of this process (PR_SET_CHILD_SUBREAPER, prctl(2)), so none can hide. Where PID namespaces
may be had, the kernel does all this and the script is not needed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def parents() -> dict[int, int]:
    """Every process and its parent (proc_pid_stat(5))."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(roots: set[int], parents: dict[int, int]) -> set[int]:
    """All processes below these, zombies included."""
    found: set[int] = set()
    generation = roots
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    return found


def main(command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    first = os.posix_spawnp(command[0], command, os.environ, setsigmask=[])
    running = True
    while running and signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGCHLD:
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) not in (0, first):
            pass
        running = ended != first
    while left := descendants({os.getpid()}, parents()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
