"""The states of a run, their exit codes, and the command that follows from each."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from typing import TYPE_CHECKING

from conf.run_folder.run_folders import usual_runs_dir
from conf.visible import visible

if TYPE_CHECKING:
    from conf.run_folder.rundir import RunDir


class State(StrEnum):
    starting = "starting"
    running = "running"
    succeeded = "succeeded"
    failing = "failing"
    failed = "failed"
    stopped = "stopped"
    lost = "lost"
    stalled = "stalled"
    incomplete = "incomplete"
    not_finite = "not finite"
    interrupted = "interrupted"
    hung = "hung"
    unknown = "unknown"


EXIT_CODES = {
    State.starting: 0,
    State.running: 0,
    State.succeeded: 0,
    State.failed: 1,
    State.stopped: 3,
    State.lost: 4,
    State.stalled: 5,
    State.incomplete: 6,
    State.not_finite: 7,
    State.interrupted: 8,
    State.hung: 9,
    State.failing: 10,
    State.unknown: 1,
}
"""docs/exit-codes.md explains them. 2 is a wrong command line, 130 an interrupted launcher."""


def word_for(run: RunDir) -> str:
    """What commands find the run by: its name, or its folder where that is not below the usual one."""
    return run.name if run.runs.resolve() == usual_runs_dir().resolve() else os.path.relpath(run.path)


def next_step(state: State, name: str) -> str:
    """What to type once a run was started, or is over. `name`: as `word_for` gives it."""
    name = shlex.quote(name)
    if state is State.succeeded:
        return f"tdpp report {name}  # its page: where the time of an iteration goes"
    if state in (State.starting, State.running):
        return f"tdpp status {name} --watch  # until it is over"
    return f"tdpp status {name}  # the evidence, and what to do"


def print_next(text: str) -> None:
    """Prints it on stderr, since what a command prints is often read by another one."""
    print(f"next: {visible(text)}", file=sys.stderr)
