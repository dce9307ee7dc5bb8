"""Schedules as steps that a vectorised simulation takes: what stages do at the same time, as slices of arrays.

Every action of a schedule has its step of a common clock, such that whatever it waits for is done in an earlier step.
How long actions really take plays no part here. Part `chunk * stages + stage` of the model is on stage `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from megatron_ext.contract.parallel_config import Schedule
from megatron_ext.contract.schedule.schedules import PARTS, Action, Kind


class Pass(IntEnum):
    """What a stage does with a micro-batch."""

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    """The part of a backward pass that the stage before waits for."""
    WEIGHT = 3
    """The rest of it, for which nobody waits."""


class PassSlice(NamedTuple):
    """Stages that all do a pass of the same sort."""

    kind: Pass
    stages: slice
    parts: slice
    reads: slice
    """The slots of the messages that they wait for; those that nobody writes are there from the beginning."""
    writes: slice
    """The slots of what they send."""


class Steps(NamedTuple):
    """A schedule for so many stages and micro-batches."""

    steps: tuple[PassSlice, ...]
    slots: int


PASSES = {
    Kind.FORWARD: Pass.FORWARD,
    Kind.BACKWARD: Pass.BACKWARD,
    Kind.BACKWARD_INPUT: Pass.INPUT,
    Kind.BACKWARD_WEIGHT: Pass.WEIGHT,
}
SHARES = {of: PARTS.get(kind, 1.0) for kind, of in PASSES.items()}
"""What they take of a forward or a backward pass."""


@lru_cache(maxsize=4096)
def steps(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Steps:
    """The steps of an iteration, in their order."""
    return _clocked(
        [schedule.definition.passes(stage, stages, chunks, micro_batches) for stage in range(stages)], chunks
    )


def _read(count: int, kind: Pass, part: int) -> int:
    """Where a part of `count` finds what it waits for: slots 0 to `count` are activations', the others gradients'."""
    return part if kind is Pass.FORWARD else count + 2 + part


def _written(count: int, kind: Pass, part: int) -> int:
    """What the following part, or the one before, reads."""
    return part + 1 if kind is Pass.FORWARD else count + 1 + part


class _Done(NamedTuple):
    """An action of a stage in its step."""

    stage: int
    part: int
    read: tuple[int, int]
    """The message that it waits for: its channel, and its number there."""
    written: tuple[int, int]


def _clocked(actions: Sequence[Sequence[Action]], chunks: int) -> Steps:
    """Every action in the first step in which its stage and its message allow it, of those that are for it.

    Where forward and backward passes take turns, forward passes of a stage are for every second step and backward
    passes for those between, so that every second stage does the same in the same step, from the first one on. A pass
    for which nobody waits shares the step of the one before it.
    """
    stages, count = len(actions), len(actions) * chunks
    turns = any(own[at].kind is Kind.FORWARD is not own[at - 1].kind for own in actions for at in range(1, len(own)))
    done: set[tuple[int, int]] = set()
    left = [0] * stages
    clock: list[dict[Pass, list[_Done]]] = []
    while any(place < len(own) for place, own in zip(left, actions, strict=True)):
        now: dict[Pass, list[_Done]] = {}
        for stage, own in enumerate(actions):
            if left[stage] == len(own):
                continue
            action, m, chunk = own[left[stage]]
            kind = PASSES[action]
            if turns and kind is not Pass.WEIGHT and (len(clock) + stage) % 2 != (kind is not Pass.FORWARD):
                continue
            part = chunk * stages + stage
            read = (_read(count, kind, part), m)
            if kind is Pass.WEIGHT or read in done or part == (0 if kind is Pass.FORWARD else count - 1):
                now.setdefault(kind, []).append(_Done(stage, part, read, (_written(count, kind, part), m)))
                following = own[left[stage] + 1 : left[stage] + 2]
                if kind is Pass.INPUT and following and following[0].kind is Kind.BACKWARD_WEIGHT:
                    now.setdefault(Pass.WEIGHT, []).append(_Done(stage, part, read, read))
        assert now or not clock or clock[-1], "the schedule deadlocks"
        for kind, passes in now.items():
            done.update(one.written for one in passes if kind is not Pass.WEIGHT)
            for one in passes:
                left[one.stage] += 1
        clock.append(now)
    depth = _depth(clock)
    found = (
        step
        for now in clock
        for kind, passes in sorted(now.items())
        for step in _runs(kind, passes, lambda message: _slot(message, depth, count, 2 if turns else 1))
    )
    return Steps(tuple(found), 2 * (count + 1) * depth)


def _depth(clock: Sequence[dict[Pass, list[_Done]]]) -> int:
    """How many slots a channel needs, so that no message is written over before it was read."""
    written: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    for step, now in enumerate(clock):
        for kind, passes in now.items():
            if kind is not Pass.WEIGHT:
                written.update((one.written, step) for one in passes)
                read.update((one.read, step) for one in passes)
    depth = 1
    for (channel, m), step in read.items():
        while written.get((channel, m + depth), step + 1) <= step:
            depth += 1
    return depth


def _slot(message: tuple[int, int], depth: int, count: int, apart: int) -> int:
    """Where a message lies: micro-batches that stages so far `apart` send in the same step, one more or one less, in
    the same place of their channels.
    """
    channel, m = message
    shift = channel // apart if channel <= count else -(channel // apart)
    return channel * depth + (m + shift) % depth


def _runs(kind: Pass, passes: Sequence[_Done], slot: Callable[[tuple[int, int]], int]) -> Iterator[PassSlice]:
    """Yield as few slices as it takes, in the order of the stages. What nobody waits for has no messages."""
    rows = [
        (one.stage, one.part, one.stage, one.stage)
        if kind is Pass.WEIGHT
        else (one.stage, one.part, slot(one.read), slot(one.written))
        for one in passes
    ]
    while rows:
        strides = [b - a for a, b in zip(rows[0], rows[1], strict=True)] if len(rows) > 1 else [1] * 4
        length = 1
        while (
            length < len(rows)
            and min(strides) > 0
            and [b - a for a, b in zip(rows[length - 1], rows[length], strict=True)] == strides
        ):
            length += 1
        strides = strides if length > 1 else [1] * 4
        yield PassSlice(
            kind, *(slice(a, z + 1, stride) for a, z, stride in zip(rows[0], rows[length - 1], strides, strict=True))
        )
        rows = rows[length:]
