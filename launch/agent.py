"""The node agent: the process that runs a node's worker, tells how it goes, and leaves nothing running.

submitit calls it, one task per node. Whatever happens, the worker and its ranks end with it: it ends them when
it is told to, when another node failed or when the run is stopped; the kernel tells it when its own parent dies, and
tells the worker when the agent does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from conf.rundir import RunDir
from launch import processes
from launch.errors import LaunchError
from launch.gpu_sampler import gpu_sampling

WORKER = "megatron_ext.worker"
SCRUBBED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
"""Not inherited by a worker: an outer launcher's view of the world, and what submitit sets for its own purposes."""

BEAT_S = 2.0
"""Between two signs of life in nodes/<node>.json."""
SILENCE_S = 30.0
"""A node that gives no sign of life for this long counts as lost."""
GRACE_S = 8.0
"""Between asking the worker to end and killing it; the worker takes up to 3 s to end its ranks."""
INTERRUPT_GRACE_S = 0.5
"""The same after SIGINT: submitit kills its tasks 1 s after that signal."""
_POLL_S = 0.1
_TOLD_TO_END = 128 + signal.SIGTERM
_NOT_FOUND = 127
"""As shells say it."""


def worker_command(run: Path, node_rank: int, worker: str = WORKER) -> list[str]:
    return [sys.executable, "-u", "-m", worker, str(run / "plan.json"), str(node_rank)]


class Worker(Protocol):
    """What runs the ranks of a node: an engine as submission chose it. It is pickled, and travels with the agent."""

    def command(self, run: RunDir, node_rank: int) -> list[str] | None:
        """None for as long as another node has to tell something first."""

    def shown(self, run: Path, node_rank: int) -> list[str]:
        """The command in a dry run, with words in the place of what only a run knows."""


@dataclass(frozen=True)
class ModuleWorker:
    """The worker of tdpp's own engine, or one that keeps the same files (docs/formats.md)."""

    module: str = WORKER

    def command(self, run: RunDir, node_rank: int) -> list[str]:
        return self.shown(run.path, node_rank)

    def shown(self, run: Path, node_rank: int) -> list[str]:
        return worker_command(run, node_rank, self.module)


def worker_environment(
    inherited: Mapping[str, str], given: Mapping[str, str], plan: Mapping[str, Any], node_rank: int
) -> dict[str, str]:
    """What a worker finds in its environment: what the agent inherited, scrubbed, and what run and node give it."""
    kept = {k: v for k, v in inherited.items() if k not in SCRUBBED and not k.startswith("SUBMITIT_")}
    return kept | given_environment(given, plan, node_rank)


def given_environment(given: Mapping[str, str], plan: Mapping[str, Any], node_rank: int) -> dict[str, str]:
    """The part of a worker's environment that is not inherited. `given` is what the run gives to all of them."""
    return {**given, **plan["nodes"][node_rank]["environment"], "NODE_RANK": str(node_rank)}


def job_info(plan: Mapping[str, Any], model: str, node_rank: int) -> str:
    """What the node was told to run, as the first lines of its log."""
    values = {
        "NODE_RANK": node_rank,
        "NNODES": len(plan["nodes"]),
        "WORLD_SIZE": len(plan["ranks"]),
        "GLOBAL_BATCH_SIZE": plan["global_batch_size"],
        "MICRO_BATCH_SIZE": plan["micro_batch_size"],
        "TENSOR_MP_SIZE": plan["tensor"],
        "DP_SIZE": plan["data"],
        "PIPELINE_MP_SIZE": plan["pipeline"],
        "PARTITION": "-".join(map(str, plan["partition"])),
        "MODEL": model,
        "HIDDEN_SIZE": plan["model"]["hidden"],
        "NUM_LAYERS": plan["model"]["layers"],
        "PROFILE": str(plan["timeline"]).lower(),
    }
    return "".join(f"{key}: {value}\n" for key, value in values.items())


@dataclass(frozen=True, kw_only=True)
class NodeAgent:
    """What submitit pickles and calls on every node."""

    run: RunDir
    model: str
    """The model's name, for the log."""
    environment: Mapping[str, str]
    """Given to the worker."""
    worker: Worker
    gpu_interval_s: int = 0
    """Seconds between two readings of the node's GPUs; 0 for none."""

    def __call__(self) -> None:
        """Runs this node's worker to its end.

        Raises:
            LaunchError: the worker ended with another exit code than 0, so that the job's own state tells too.
        """
        from submitit import JobEnvironment

        job = JobEnvironment()
        told = _Told()
        processes.die_with_parent()
        # The parent may have died before the kernel was asked to tell; a local job's id is its parent's.
        if job.cluster == "local" and os.getppid() != int(job.raw_job_id):
            told.by = signal.SIGTERM
        code = _Node(self, job.global_rank, told).run()
        if code != 0:
            raise LaunchError(f"node rank {job.global_rank}: the worker ended with {code}")


class _Told:
    """Remembers the first signal that asks this process to end."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        # SIGUSR2 is how submitit announces the time limit; its own handlers would requeue the job or ignore the signal.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(signum, self._note)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.by = self.by or signal.Signals(signum)


class _Node:
    """One node of the run, while its worker lives."""

    def __init__(self, agent: NodeAgent, node_rank: int, told: _Told) -> None:
        self._run = agent.run
        self._agent = agent
        self._node_rank = node_rank
        self._told = told
        self._plan: dict[str, Any] = agent.run.read_json(agent.run.plan)
        self._name: str = self._plan["nodes"][node_rank]["name"]
        self._peers = [Peer(agent.run, n["name"]) for n in self._plan["nodes"] if n["name"] != self._name]
        self._state: dict[str, Any] = {
            "node": self._name,
            "node_rank": node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_unix": time.time(),
            "state": "starting",
            "beat_unix": time.time(),
            "ended_unix": None,
            "exit_code": None,
            "stopped": None,
        }
        self._next_beat = 0.0

    def run(self) -> int:
        """Starts the worker unless the run is over already; returns its exit code, negative for a signal."""
        self._publish()
        self._look_around()
        command = self._command()
        given = given_environment(self._agent.environment, self._plan, self._node_rank)
        with gpu_sampling(self._run, self._name, self._agent.gpu_interval_s, given):
            code = _TOLD_TO_END if command is None else self._run_worker(command)
        stopped = self._told.by.name if self._told.by else None
        self._publish(state="ended", exit_code=code, stopped=stopped, ended_unix=time.time())
        return code

    def _command(self) -> list[str] | None:
        """What runs this node's ranks; None when the node is told to end before that is known."""
        while not self._told.by:
            command = self._agent.worker.command(self._run, self._node_rank)
            if command is not None:
                return command
            if time.monotonic() >= self._next_beat:
                self._publish()
            self._look_around()
            time.sleep(_POLL_S)
        return None

    def _run_worker(self, command: list[str]) -> int:
        try:
            worker = self._start_worker(command)
        except FileNotFoundError:  # for example a profiler, which only its nodes can have
            with self._run.node_err(self._name).open("a", encoding="utf-8") as err:
                err.write(f"{command[0]}: no such command on {socket.gethostname()}\n")
            return _NOT_FOUND
        try:
            self._publish(state="running")
            self._watch(worker)
        finally:
            # The worker is not waited for yet, so that its group cannot be another's by now.
            os.killpg(worker.pid, signal.SIGKILL)
            code = worker.wait()
            # What has left the group, such as a helper with a session of its own.
            processes.kill(self._agent.environment[processes.TOKEN], self._node_rank)
        return code

    def _start_worker(self, command: list[str]) -> subprocess.Popen[bytes]:
        run, rank = self._run, self._node_rank
        with run.node_out(self._name).open("ab") as out, run.node_err(self._name).open("ab") as err:
            out.write(job_info(self._plan, self._agent.model, rank).encode())
            out.flush()
            return subprocess.Popen(
                command,
                env=worker_environment(os.environ, self._agent.environment, self._plan, rank),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,  # kept across exec; not every worker asks for it itself
            )

    def _watch(self, worker: subprocess.Popen[bytes]) -> None:
        """Returns when the worker has ended, or did not although it was asked to."""
        deadline: float | None = None
        while not _has_ended(worker.pid):
            if time.monotonic() >= self._next_beat:
                self._publish()
            if deadline is None:
                self._look_around()
                if self._told.by:
                    os.kill(worker.pid, signal.SIGTERM)
                    grace = INTERRUPT_GRACE_S if self._told.by is signal.SIGINT else GRACE_S
                    deadline = time.monotonic() + grace
            elif time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _look_around(self) -> None:
        """Ends this node too when the run is being stopped, or another node has failed or is lost."""
        if self._run.stop_request.exists() or any(peer.has_failed() for peer in self._peers):
            self._told.by = self._told.by or signal.SIGTERM

    def _publish(self, **changes: Any) -> None:
        self._state |= {"beat_unix": time.time(), **changes}
        self._run.write_json(self._run.node_state(self._name), self._state)
        self._next_beat = time.monotonic() + BEAT_S


class Peer:
    """Another node of the run, as its state file tells. Its beats are timed by this node's clock."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._run = run
        self._name = name
        self._beat: float | None = None
        self._seen = time.monotonic()
        self._next_look = 0.0

    def has_failed(self) -> bool:
        """Whether it ended badly, or went silent after it had started."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + BEAT_S / 2
        state = self._run.read_json(self._run.node_state(self._name))
        if state is None:  # not started; its ranks are waited for by those who need them
            return False
        if state["state"] == "ended":
            return bool(state["exit_code"] != 0)
        if state["beat_unix"] != self._beat:
            self._beat, self._seen = state["beat_unix"], now
        return now - self._seen > SILENCE_S


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is left to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
