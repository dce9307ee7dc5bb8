"""How many passes and micro-batches a schedule keeps waiting, by formula: for plans that are not replayed one by one.

What a schedule says of itself (megatron_ext/contract/schedule/schedules.py) meets a number of micro-batches here.
Numbers may be arrays. A rank takes `count` micro-batches, and to the stages after and before it belong so many for each
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from megatron_ext.contract.parallel_config import Schedule

Number = TypeVar("Number", int, float, Floats, Integers)


def filling(schedule: Schedule) -> float:
    """The part of the last backward pass in which gradients of weights become complete: with ZB-H1 its second half."""
    one = schedule.definition
    return 1 - one.input_share if one.splits_backward else 1.0


def in_flight(schedule: Schedule, stage: Number, stages: int, count: Any) -> Number:
    """Micro-batches that a stage of one chunk holds at once, at most."""
    return np.minimum(count, schedule.definition.held(stage, stages))


@lru_cache(maxsize=4096)
def chunks_in_flight(schedule: Schedule, stages: int, count: int, chunks: int) -> NDArray[np.int64]:
    """[moments, chunks, stages]: micro-batches of each chunk that a stage holds, at the moments that may take most."""
    held = [schedule.definition.held_by_chunk(stage, stages, chunks, count) for stage in range(stages)]
    return np.moveaxis(np.array(held), 0, 2)


def forward_left(schedule: Schedule, after: Number, count: Any) -> Number:
    """Forward passes that a rank still has when its first backward pass begins."""
    return np.maximum(0, count - schedule.definition.ahead(after) - 1)


def backward_left(schedule: Schedule, before: Number, count: Any) -> Number:
    """Backward passes that a rank has between its first one and its last gradient for the stage before."""
    one = schedule.definition
    owed = np.minimum(one.lag(before), count - 1) * (1 - one.input_share)
    return np.maximum(0.0, count - 1 - owed)


@dataclass(frozen=True, kw_only=True)
class Left:
    """Passes that a stage still has after its first gradient left for the stage before: how many, [chunks, stages].

    Not counted are those whose gradient nobody waits for.
    """

    forward: Floats
    backward: Floats


@lru_cache(maxsize=4096)
def passes_left(schedule: Schedule, stages: int, chunks: int, count: int, gone: int = 1) -> Left:
    """After the first micro-batch's gradient, which has come from the end of the model; with several chunks, after
    `gone` gradients of the first group of micro-batches have left the stage's first chunk."""
    one, number = schedule.definition, np.arange(float(stages))
    if one.has_chunks:
        left = [one.left_by_chunk(stage, stages, chunks, count, gone) for stage in range(stages)]
        forward, backward = np.moveaxis(np.array(left, float), 0, 2).swapaxes(0, 1)
        return Left(forward=forward, backward=backward)
    ahead = np.minimum(count, one.overlapped(stages - 1 - number))
    return Left(forward=(count - ahead)[np.newaxis], backward=backward_left(schedule, number, count)[np.newaxis])
