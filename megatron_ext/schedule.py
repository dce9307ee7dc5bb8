"""Pipeline schedules as data: per rank a list of actions, which one executor runs."""

from __future__ import annotations

from enum import Enum
from typing import List, NamedTuple

from megatron_ext.errors import EngineError


class Kind(Enum):
    """What an action does; the values name the timeline's events."""

    FORWARD = "forward-compute"
    BACKWARD = "backward-compute"
    RECV_FORWARD = "forward-recv"
    SEND_FORWARD = "forward-send"
    RECV_BACKWARD = "backward-recv"
    SEND_BACKWARD = "backward-send"


class Action(NamedTuple):
    """One step of a rank: what, and for which micro-batch."""

    kind: Kind
    micro_batch: int


def actions(schedule: str, stage: int, stages: int, micro_batches: int) -> List[Action]:
    """The actions of one iteration on `stage`, in the order in which the rank takes them."""
    if schedule != "one_f_one_b":
        raise EngineError(f"schedule={schedule!r} is not known; known: one_f_one_b")
    return one_f_one_b(stage, stages, micro_batches)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> List[Action]:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2.1).

    A stage runs as many forward passes ahead as there are stages after it, then alternates, so that it never
    holds activations of more than `stages - stage` micro-batches.
    """
    steps: List[Action] = []

    def forward(m: int) -> None:
        if stage > 0:
            steps.append(Action(Kind.RECV_FORWARD, m))
        steps.append(Action(Kind.FORWARD, m))
        if stage < stages - 1:
            steps.append(Action(Kind.SEND_FORWARD, m))

    def backward(m: int) -> None:
        if stage < stages - 1:
            steps.append(Action(Kind.RECV_BACKWARD, m))
        steps.append(Action(Kind.BACKWARD, m))
        if stage > 0:
            steps.append(Action(Kind.SEND_BACKWARD, m))

    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        forward(m)
    for m in range(ahead, micro_batches):
        forward(m)
        backward(m - ahead)
    for m in range(micro_batches - ahead, micro_batches):
        backward(m)
    return steps
