"""The command that follows, at the end of what another one prints."""

from __future__ import annotations

import os
import shlex
import sys

from conf.run_folder.run_folders import usual_runs_dir
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.judge.state import State


def word_for(run: RunDir) -> str:
    """What commands find the run by: its name, or its folder where that is not below the usual one."""
    return run.name if run.runs.resolve() == usual_runs_dir().resolve() else os.path.relpath(run.path)


def next_step(state: State, name: str) -> str:
    """What to type once a run was started, or is over.

    Args:
        name: as `word_for` gives it.
    """
    name = shlex.quote(name)
    if state is State.succeeded:
        return f"tdpp report {name}  # its page: where the time of an iteration goes"
    if state in (State.starting, State.running):
        return f"tdpp status {name} --watch  # until it is over"
    return f"tdpp status {name}  # the evidence, and what to do"


def print_next(text: str) -> None:
    """On stderr: what a command prints is often read by another one."""
    print(f"next: {visible(text)}", file=sys.stderr)
