"""What can be seen of a run, on disk and among the processes of this machine; judged in `launch.verdict`."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import RunFolderError
from conf.gpu_lines import entries
from conf.log_lines import IterationLine, iteration_line
from conf.rundir import RunDir
from launch import processes
from launch.agent import SILENCE_S
from launch.gpu_health import READINGS, NodeGpus

TAIL_BYTES = 64 * 1024
"""Of metrics.jsonl some 200 logged iterations, of Megatron-LM's log with its timers some 30: enough for the pace."""
GPU_TAIL_BYTES = 16 * 1024
"""Of nodes/<node>.gpu: the last three readings of 16 GPUs, and more."""
START_S = 5.0
"""A run without a process counts as lost after this time; before, it is still being started."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as its agent last told. `state` is `absent` before it has told anything."""

    name: str
    state: str = "absent"
    alive: bool
    """Whether its agent lives, or, while absent, may still come."""
    pid: int | None = None
    exit_code: int | None = None
    """Of the worker; negative for a signal."""
    stopped: str | None = None
    """Name of the signal by which it was told to end."""
    seen_unix: float = 0.0
    """Its end, or its last sign of life."""

    @property
    def ended(self) -> bool:
        return self.state == "ended"


@dataclass(frozen=True, kw_only=True)
class RankError:
    """errors/rank-*.json; `symptom` if the rank only lost another one."""

    rank: int
    stage: int
    dp: int
    tp: int
    node: str
    unix: float
    type: str
    message: str
    symptom: bool


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A logged iteration. `elapsed_ms` is the mean per iteration since the one logged before."""

    iteration: int
    unix: float
    elapsed_ms: float
    loss: float | None
    """None where all iterations since the line before were skipped, and in a rehearsal."""
    nan: int


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A run at one moment."""

    plan: dict[str, Any]
    now_unix: float
    created_unix: float
    stop_unix: float | None
    """When it was asked to stop."""
    nodes: tuple[Node, ...]
    errors: tuple[RankError, ...]
    """By time."""
    log: tuple[Iteration, ...]
    """The last logged iterations."""
    gpus: tuple[NodeGpus, ...]
    """Of the nodes at work; none in a run on CPUs."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come: every node has ended or is lost."""
        return all(node.ended or not node.alive for node in self.nodes)

    @property
    def iterations(self) -> int:
        return int(self.plan["train"]["iterations"])


def observe(run: RunDir, now: float | None = None) -> Observation:
    """Looks at everything once. `now` is in seconds since 1970.

    Raises:
        RunFolderError: a file of the run is not what it should be.
    """
    now = time.time() if now is None else now
    plan = run.read_json(run.plan)
    if plan is None:
        raise RunFolderError(f"{run.path} is not a run: plan.json is not there")
    created = run.plan.stat().st_mtime
    names = [node["name"] for node in plan["nodes"]]
    states = {name: run.read_json(run.node_state(name)) for name in names}
    living: set[int] | None = None
    if not all(state and state["state"] == "ended" for state in states.values()) and _is_here(run):
        # Processes first: one that ends in between is then seen by what it left, not taken for lost.
        living = processes.find(run.read_json(run.jobs)["token"])
        states = {name: run.read_json(run.node_state(name)) for name in names}
    errors = (_error(run.read_json(path)) for path in run.errors.glob("rank-*.json"))
    request = run.read_json(run.stop_request)
    nodes = tuple(_node(name, states[name], living, now, created) for name in names)
    return Observation(
        plan=plan,
        now_unix=now,
        created_unix=created,
        stop_unix=request["unix"] if request else None,
        nodes=nodes,
        errors=tuple(sorted(errors, key=lambda error: error.unix)),
        log=read_text_log(run.node_out(names[-1])) if "engine" in plan else read_log(run.metrics),
        gpus=_gpus(run, plan, nodes) if plan["device"] == "cuda" else (),
    )


def _gpus(run: RunDir, plan: dict[str, Any], nodes: tuple[Node, ...]) -> tuple[NodeGpus, ...]:
    ranks = {node["name"]: len(node["ranks"]) for node in plan["nodes"]}
    return tuple(
        NodeGpus(
            node=node.name,
            ranks=ranks[node.name],
            entries=entries(_tail(run.node_gpu(node.name), GPU_TAIL_BYTES), READINGS),
        )
        for node in nodes
        if node.state == "running" and node.alive
    )


def read_log(path: Path) -> tuple[Iteration, ...]:
    """The last lines of metrics.jsonl."""
    try:
        return tuple(_iteration(json.loads(line)) for line in _last_lines(path))
    except (ValueError, KeyError) as error:
        raise RunFolderError(f"{path} holds a line that is no logged iteration: {error}") from error


def read_text_log(path: Path) -> tuple[Iteration, ...]:
    """The last iterations in what Megatron-LM's last rank printed.

    Their time is that of the last writing: the time in the lines is a container's, of an unknown zone.
    """
    logged = [found for line in _last_lines(path) if (found := iteration_line(line)) is not None]
    unix = path.stat().st_mtime if logged else 0.0
    return tuple(
        Iteration(iteration=one.iteration, unix=unix, elapsed_ms=one.elapsed_ms, loss=_trained(one), nan=one.nan)
        for one in logged
    )


def _trained(line: IterationLine) -> float | None:
    """The loss of a line; Megatron-LM leaves it out where it is no number, and where everything was skipped."""
    return None if math.isnan(line.loss) and line.skipped and not line.nan else line.loss


def _last_lines(path: Path) -> list[str]:
    """Whole lines from the end of a file that may not be there yet; one that is still being written is left out."""
    return _tail(path, TAIL_BYTES).split("\n")[:-1]


def _tail(path: Path, size: int) -> str:
    """The end of a file that may not be there yet, from the begin of a line."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return text.partition("\n")[2] if start else text


def _is_here(run: RunDir) -> bool:
    """Whether the run's processes are this user's and on this machine, so that they can be looked for."""
    origin = run.read_json(run.provenance)
    return bool(origin and origin["host"] == socket.gethostname() and run.path.stat().st_uid == os.getuid())


def _node(name: str, state: Any, living: set[int] | None, now: float, created: float) -> Node:
    """`living` are the run's processes if they can be seen; otherwise signs of life must do."""
    if state is None:
        patience = START_S if living is not None else SILENCE_S
        return Node(name=name, alive=bool(living) or now - created < patience, seen_unix=created)
    alive = state["pid"] in living if living is not None else now - state["beat_unix"] < SILENCE_S
    return Node(
        name=name,
        state=state["state"],
        alive=alive and state["state"] != "ended",
        pid=state["pid"],
        exit_code=state["exit_code"],
        stopped=state["stopped"],
        seen_unix=state["ended_unix"] or state["beat_unix"],
    )


def _error(content: Any) -> RankError:
    return RankError(**{name: content[name] for name in RankError.__dataclass_fields__})


def _iteration(content: Any) -> Iteration:
    return Iteration(**{name: content[name] for name in Iteration.__dataclass_fields__})
