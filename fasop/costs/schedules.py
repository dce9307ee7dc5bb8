"""How many passes and micro-batches a schedule keeps waiting, by formula: for plans that are not replayed one by one.

Stages have one chunk. A rank runs `ahead` more forward passes than backward passes need at first, has its weight
gradients `lag` micro-batches later where they are passes of their own, and takes `count` micro-batches: as `_flushing`
of megatron_ext/contract/schedule/schedules.py has them. All are numbers or arrays.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from conf.schema.values.schedules import Schedule
from fasop.costs.arrays import Floats, Integers

Number = TypeVar("Number", int, float, Floats, Integers)


def filling(schedule: Schedule) -> float:
    """The part of the last backward pass in which gradients of weights become complete: with ZB-H1 its second half."""
    return 1 - schedule.input_share if schedule.splits_backward else 1.0


def in_flight(schedule: Schedule, ahead: Number, lag: Number, count: Any) -> Number:
    """Micro-batches that a rank holds at once, at most."""
    if schedule.forward_first:
        held: Number = count + 0 * ahead
    elif schedule is Schedule.model_parallel:
        held = 1 + 0 * ahead
    else:
        held = np.minimum(count, ahead + 1 + (lag if schedule.splits_backward else 0))
    return held


def forward_left(schedule: Schedule, ahead: Number, count: Any) -> Number:
    """Forward passes that a rank still has when its first backward pass begins."""
    left: Number = 0 * ahead if schedule.forward_first else np.maximum(0, count - ahead - 1)
    return left


def backward_left(schedule: Schedule, lag: Number, count: Any) -> Number:
    """Backward passes that a rank has between its first one and its last gradient for the stage before."""
    owed = np.minimum(lag, count - 1) * (1 - schedule.input_share)
    left: Number = np.maximum(0.0, count - 1 - owed)
    return left
