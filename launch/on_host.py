"""python -m launch.on_host look|figures|start|end: what tdpp does on a host that ssh has reached.

It reads one JSON object from stdin, and prints its answer as one line of JSON behind a mark (`launch.machine.ssh`).
`start` gets what the node's agent is to do: it came through ssh from the user's own launch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.errors import TdppError
from conf.run_folder.json_values import typed
from conf.run_folder.rundir import RunDir
from conf.schema.containers import ContainerKind
from conf.utf8 import enter_utf8_mode
from launch.control.executors.local import check_port, start_agents
from launch.errors import LaunchError
from launch.files.own_path import own_folder
from launch.machine import processes
from launch.machine.docker import remove_all
from launch.machine.node_figures import node_figures
from launch.machine.provenance import software
from launch.machine.ssh import MARK
from launch.node.container_setup import check_program
from launch.node.settings import NodeSettings


def main(argv: Sequence[str]) -> int:
    os.umask(os.umask(0o022) | 0o022)
    given = json.load(sys.stdin)
    verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "look": look,
        "figures": figures,
        "start": start,
        "end": end,
    }
    verb = verbs[argv[0]]
    try:
        answer = verb(given)
    except TdppError as error:
        answer = {"error": str(error)}
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    return 0


def look(given: Mapping[str, Any]) -> dict[str, Any]:
    """What this host is and has. `run` is the folder that a launch has just made, `token` what it wrote there. Raises
    LaunchError: something keeps a run from being started here."""
    host = socket.gethostname()
    if (run := given.get("run")) is not None:
        _check_shared(RunDir(Path(run)), given["token"], given["runs_dir"])
    if given.get("port") is not None:
        check_port(given["port"], host)
    if (kind := ContainerKind(given["container"])) is not ContainerKind.none:
        check_program(kind)
    return {"host": host, "unix": time.time(), **software()}


def figures(given: Mapping[str, Any]) -> dict[str, Any]:
    """What 'tdpp init' wants to know of this host."""
    return asdict(node_figures())


def _check_shared(run: RunDir, token: str, runs_dir: str) -> None:
    """The run's folder is the one that the launch has made, and this user may write there."""
    way_out = "choose a runs_dir that this machine and all hosts share, for example over NFS"
    try:
        found = json.loads(run.jobs.read_bytes())
    except (OSError, ValueError):
        raise LaunchError(
            f"cannot see the run's folder {run.path} (runs_dir={runs_dir}), which the launching machine created; "
            f"{way_out}"
        ) from None
    if found.get("token") != token:
        raise LaunchError(f"has another folder {run.path} than the launching machine; {way_out}")
    owner = run.path.stat().st_uid
    if owner != os.geteuid():
        raise LaunchError(
            f"the run's folder belongs to user {owner}, but ssh logs in as user {os.geteuid()} here; use accounts "
            f"with the same number on all hosts (User in ~/.ssh/config)"
        )
    if not os.access(run.nodes, os.W_OK | os.X_OK):
        raise LaunchError(f"cannot write to {run.path}; mount runs_dir={runs_dir} writable")


def start(given: Mapping[str, Any]) -> dict[str, Any]:
    """Starts the agent of this host's node, which outlives this process; what jobs.json is to say of it."""
    settings = typed(NodeSettings, given["agent"], "what the launch sent")
    os.environ.update(given["environment"])
    run, node = settings.run, given["node"]
    folder = run.submitit_of(node)
    with own_folder(run.path, run.submitit.name, group=settings.group_writes):
        folder.mkdir(mode=0o755, exist_ok=True)
    entry = folder / "job.json"
    start_agents(settings, given["token"], given["time_min"], folder, node, lambda job: run.write_json(entry, job))
    return {**run.read_json(entry), "boot": processes.boot()}


def end(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ends every process of the run on this host."""
    ended = processes.terminate(given["token"], given["grace_s"])
    if given["container"] == ContainerKind.docker:
        remove_all(given["token"])
    return {"ended": len(ended)}


if __name__ == "__main__":
    enter_utf8_mode()
    sys.exit(main(sys.argv[1:]))
