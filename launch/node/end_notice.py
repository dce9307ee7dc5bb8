"""The last node to end has the run's end told, by a process of its own (`launch.on_end`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

from conf.errors import RunFolderError
from conf.run_folder.run_files import appended
from conf.run_folder.rundir import RunDir
from launch.files.records import NodeRecord, Start
from launch.machine.provenance import path_of_agents
from launch.node.peers import SILENCE_S
from megatron_ext.contract.worker import NODE_RANK, START, TOKEN

TOLD_S = 60.0
"""So long a node waits at its end for that."""
_OWN = (TOKEN, NODE_RANK, START)
"""Whoever ends the run's processes by these is not to end what tells of it."""


def tell_if_last(run: RunDir, node: str, start: Start, code: int) -> None:
    """Is called when the node has written its end. Where two nodes end at the same moment both may be the last, and
    `launch.on_end` tells once."""
    if not run.notify.is_file() or _others_at_work(run, node, start, code):
        return
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    environment["PYTHONPATH"] = path_of_agents()
    with appended(run.node_err(node)) as err:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launch.on_end", str(run.path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
    with suppress(subprocess.TimeoutExpired):
        process.wait(TOLD_S)


def _others_at_work(run: RunDir, node: str, start: Start, code: int) -> bool:
    """A node that has not come is waited for, unless this one has failed."""
    plan = run.read_plan()
    for name in (plan.nodes[rank].name for rank in plan.used):
        if name == node:
            continue
        try:
            state = run.read(run.node_state(name), NodeRecord)
        except RunFolderError:
            continue
        if state is None or state.of < start:
            if code == 0:
                return True
        elif state.state != "ended" and time.time() - state.beat_unix < SILENCE_S:
            return True
    return False
