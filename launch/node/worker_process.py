"""A node's worker: started on the host or in a container, asked to save or to end, cleared away; and the signals that
ask its agent for that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import FrameType
from typing import IO

from conf.errors import RunFolderError
from conf.run_folder.rundir import RunDir
from launch.files.records import Start, StopRecord
from launch.machine import processes
from launch.machine.container_runtimes import Command, RunContainer, SlurmStep, Worker
from launch.machine.docker import remove
from launch.node.worker_command import scrubbed
from megatron_ext.contract.worker import AGENT, TOKEN, die_with_parent


class Wanted(Enum):
    """What a node wants of its worker while that runs."""

    left_alone = "left alone"
    saved = "saved"
    """It is to save, and end by itself; it is asked to end where it takes too long."""
    ended = "ended"
    """It is asked to end, and killed where it does not."""
    killed = "killed"


class WorkerProcess:
    """What was started to run a node's worker: the worker itself, or what runs it, such as a profiler."""

    def __init__(self, command: Command, node_rank: int, out: IO[bytes], err: IO[bytes], *, group_writes: bool) -> None:
        """Starts it; with `group_writes` its umask takes nothing from the group. Raises FileNotFoundError: there is no
        such command."""
        self._token = command.environment[TOKEN]
        self._node_rank = node_rank
        self._apart = command.apart
        self._remove = command.remove
        self._end = signal.SIGINT if AGENT in command.environment else signal.SIGTERM
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
        processes.send([self._process.pid if self._pid is None else self._pid], self._end)

    @property
    def _pid(self) -> int | None:
        """Returns the process that takes signals; None for one in a step or container that does not listen yet."""
        if not self._apart:
            return self._process.pid
        if self._of_step is None:
            self._of_step = processes.first_of_step(self._token, self._node_rank, self._process.pid)
        return self._of_step

    def clear(self) -> int:
        """Kills what is left of it; its exit code, negative for a signal. Raises LaunchError: some of it lives on, held
        by a driver or a file system."""
        os.killpg(self._process.pid, signal.SIGKILL)
        if self._remove:
            remove(self._remove)
        # Also what has left the group, such as a helper with a session of its own, or the step in which pyxis runs it.
        processes.kill(self._token, self._node_rank)
        return self._process.wait()


def _prepare() -> None:
    die_with_parent(signal.SIGTERM)  # kept across exec; not every worker asks for it itself
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to every process of a job


def process_to_start(
    container: RunContainer | None,
    name: str,
    command: Sequence[str],
    given: Mapping[str, str],
    inherited: Mapping[str, str],
    step: SlurmStep | None,
) -> Command:
    """The worker's process, with its whole environment.

    `name` is the node's container, `given` what run and node give the worker, `inherited` the agent's own environment.
    """
    kept = scrubbed(inherited)
    if container is None:
        return Command(tuple(command), kept | dict(given))
    kept = container.runtime.inherited(kept)
    started = container.runtime.start(Worker(container, name, given, command, step))
    return replace(started, environment=kept | dict(started.environment))


class StopSignals:
    """Remembers the signals that ask this process to end, or to save first."""

    end: signal.Signals | None = None
    end_unix: float | None = None
    save = False
    asked = False
    """Whether SIGTERM has come, of which is not known yet whether it leaves time to save."""
    weighs = False
    """Whether the next SIGTERM may do so."""
    stop_saves = False
    """Whether it is who stops the run that wants it saved first, and says when that takes too long."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        # By it submitit and Slurm announce the end; submitit's own handler would not know of the run's other nodes.
        signal.signal(signal.SIGUSR2, self._note_save)

    def note_end(self, signum: int) -> None:
        """Counts only the first time."""
        if self.end is None:
            self.end, self.end_unix = signal.Signals(signum), time.time()

    def look_for_stop(self, run: RunDir) -> None:
        """Takes note of a request to stop the run, which may be to save first."""
        if not run.stop_request.exists():
            return
        try:
            request = run.read(run.stop_request, StopRecord)
        except RunFolderError:
            request = None
        if request is not None and request.saves:
            self.save = self.stop_saves = True
        else:
            self.note_end(signal.SIGTERM)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGTERM and self.weighs:
            self.weighs, self.asked = False, True
        else:
            self.note_end(signum)

    def _note_save(self, _signum: int, _: FrameType | None) -> None:
        self.save = True


def ask_all_to_save(run: RunDir, start: Start, node: str) -> None:
    """Has all nodes save and end, since a signal may have come to this one, or its job, alone."""
    request = run.save_request(str(start))
    if not request.exists():
        run.write_json(request, {"node": node, "unix": time.time()})
