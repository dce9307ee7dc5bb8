"""Agents on this machine, through submitit's LocalExecutor: one controller process, one task per node. Of a local run
they are all of the plan's; on a host that ssh reaches, the host's own."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conf.errors import reworded
from conf.schema.executor import Executor
from launch.errors import LaunchError
from launch.machine import processes
from launch.machine.provenance import path_of_agents
from launch.node.settings import NodeSettings
from launch.node.worker_command import SCRUBBED
from megatron_ext.contract.files import write_atomic
from megatron_ext.contract.worker import TOKEN

KILL_GRACE_S = 3.0
_HELD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def check_port(port: int | None, where: str = "this machine") -> None:
    """Raises LaunchError if something listens on the port by which the ranks are to meet."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with reworded(
            LaunchError,
            f"executor.master_port={port} is not available on {where} (",
            "); choose another port, or null for a free one",
        ):
            probe.bind(("", port))


def warning_s(executor: Executor) -> int:
    """How long before the time limit submitit warns the agents (SIGUSR2); it kills them at the limit."""
    return min(executor.save_s, executor.time_min * 30)


def start(settings: NodeSettings, token: str, time_min: int) -> None:
    """Starts the node agents, which outlive this process and its terminal; jobs.json then names their job. Raises
    LaunchError: submitit could not start them. Nothing of them is left then."""
    run = settings.run

    def note(entry: dict[str, Any]) -> None:
        run.write_json(run.jobs, {**run.read_json(run.jobs), "jobs": [entry]})

    start_agents(settings, token, time_min, run.submitit, "local", note)
    try:
        run.link_job(run.read_json(run.jobs)["jobs"][0]["id"])
    except BaseException:
        processes.terminate(token, KILL_GRACE_S)
        raise


def start_agents(
    settings: NodeSettings, token: str, time_min: int, folder: Path, role: str, note: Callable[[dict[str, Any]], None]
) -> None:
    """Starts the agents of some nodes here. What they print lies in `folder`, and what they are to do in a file of
    `role`. The process that has started them calls `note` with what jobs.json is to say of them.

    Raises:
        LaunchError: submitit could not start them. No process of the run is left on this machine then.
    """
    import submitit  # before the fork, so that it is not imported there each time

    class Controller(submitit.LocalExecutor):
        def submit_words(self, words: Sequence[str]) -> str:
            """Submits a command line, and no pickled function as submitit's own `submit`."""
            return str(self._submit_command(shlex.join(words)).job_id)

    run = settings.run
    file = run.agent(settings.submission, role)
    words = [sys.executable, "-P", "-u", "-m", "launch.start_agent", str(run.submitit), file.name]
    words += ["group"] if settings.group_writes else []
    write_atomic(file, settings.to_json())

    def submit() -> None:
        os.environ[TOKEN] = token
        for name in SCRUBBED:  # agents differ from their workers by NODE_RANK
            os.environ.pop(name, None)
        os.environ |= {"PYTHONPATH": path_of_agents(), "PYTHONSAFEPATH": "1"}  # submitit's controller, too
        controller = Controller(folder)
        controller.update_parameters(
            tasks_per_node=len(settings.nodes),
            timeout_min=time_min,
            signal_delay_s=int(settings.save_s),
            gpus_per_node=0,
        )
        job = controller.submit_words(words)
        note({"id": job, "pid": int(job), "host": socket.gethostname(), "nodes": list(settings.nodes)})

    try:
        _detached(submit, folder / "controller.log")
    except BaseException:  # Ctrl-C too
        processes.terminate(token, KILL_GRACE_S)
        raise


def _detached(action: Callable[[], None], log: Path) -> None:
    """Does `action` in a forked child with a session and streams of its own.

    What the child starts therefore has no terminal that could end it, holds no pipe of the caller open, and is
    not stopped half-way by the caller's Ctrl-C. submitit itself starts its controller as a plain child.

    Raises:
        LaunchError: it failed; the child left the reason in `log`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        child = os.fork()
        if child == 0:
            _act(action, str(log))
        _, status = os.waitpid(child, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise LaunchError(f"the run could not be started: {lines[-1] if lines else 'its controller left no message'}")


def _act(action: Callable[[], None], log: str) -> NoReturn:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        for stream, source in enumerate((null, out, out)):
            os.dup2(source, stream)
        for signum in _HELD:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        action()
        code = 0
    except BaseException:  # noqa: BLE001  (the parent reads it from the log and reports it)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
