"""A node's worker while it runs: it is asked to save or to end, and cleared away with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import IO

from launch.machine import processes
from launch.machine.container_commands import Command
from launch.machine.docker import remove
from megatron_ext.contract.worker import TOKEN, die_with_parent


class WorkerProcess:
    """What was started to run a node's worker: the worker itself, or what runs it, such as a profiler."""

    def __init__(self, command: Command, node_rank: int, out: IO[bytes], err: IO[bytes], *, group_writes: bool) -> None:
        """Starts it; with `group_writes` its umask takes nothing from the group.

        Raises:
            FileNotFoundError: there is no such command.
        """
        self._token = command.environment[TOKEN]
        self._node_rank = node_rank
        self._apart = command.apart
        self._remove = command.remove
        self._of_step: int | None = None
        self._process = subprocess.Popen(
            command.argv,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            umask=processes.own_umask() & ~0o070 if group_writes else -1,
            preexec_fn=_prepare,
        )

    @property
    def ended(self) -> bool:
        """It is not waited for yet then, so that its group cannot be another's."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it, so that it does nothing until it is continued."""
        return self._pid is not None and processes.is_stopped(self._pid)

    @property
    def listens(self) -> bool:
        """Whether it would not simply die of being asked to end."""
        return self._pid is not None and processes.catches(self._pid, signal.SIGTERM)

    def ask_to_save(self) -> None:
        """Tells the worker and its ranks, whatever they run in; not those that do not listen yet."""
        living = processes.find(self._token, self._node_rank)
        processes.send((pid for pid in living if processes.catches(pid, signal.SIGUSR2)), signal.SIGUSR2)

    def ask_to_end(self) -> None:
        """Tells the worker, or srun or docker as long as the worker that these have started does not listen."""
        processes.send([self._process.pid if self._pid is None else self._pid], signal.SIGTERM)

    @property
    def _pid(self) -> int | None:
        """Of the process that is to hear of things; None for one in a step or container that does not listen yet."""
        if not self._apart:
            return self._process.pid
        if self._of_step is None:
            self._of_step = processes.first_of_step(self._token, self._node_rank, self._process.pid)
        return self._of_step

    def clear(self) -> int:
        """Kills what is left of it; its exit code, negative for a signal.

        Raises:
            LaunchError: some of it lives on, held by a driver or a file system.
        """
        os.killpg(self._process.pid, signal.SIGKILL)
        if self._remove:
            remove(self._remove)
        # Also what has left the group, such as a helper with a session of its own, or the step in which pyxis runs it.
        processes.kill(self._token, self._node_rank)
        return self._process.wait()


def _prepare() -> None:
    die_with_parent(signal.SIGTERM)  # kept across exec; not every worker asks for it itself
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to every process of a job
