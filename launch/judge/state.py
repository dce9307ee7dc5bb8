"""The states that a verdict gives a run, and their exit codes."""

from __future__ import annotations

from enum import StrEnum


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
