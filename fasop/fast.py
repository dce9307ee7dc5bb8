"""Simulates one schedule for thousands of pipelines at once: exactly what `simulate` says, many times faster.

In a schedule of equal steps, every action has its step of a common clock. All actions of a step, which are of different
stages, are done together as rows of an array, and all pipelines as its columns; how long they really take only
enters by the maximum of what an action waits for. So a batch costs some 2 (micro-batches + stages) operations of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.schema import Schedule
from fasop.errors import SearchError

Floats = NDArray[np.float64]

KNOWN = (Schedule.one_f_one_b, Schedule.gpipe)


class Step(NamedTuple):
    """Stages that all do a forward pass, or all a backward pass, of their next micro-batch."""

    forward: bool
    stages: slice
    receivers: slice
    """The slots of their messages: stage + 1 for what goes forward, stage for what goes back."""


def ends(
    schedule: Schedule,
    micro_batches: int,
    *,
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    start: Floats,
) -> Floats:
    """When each stage has done its last backward pass; arrays are [stages, pipelines].

    `send_forward` is from the end of a stage's forward pass until the next stage has its result, `send_backward`
    likewise; `start` is when a stage begins.
    """
    steps = _steps(schedule, len(forward), micro_batches)
    now = start.copy()
    activations = np.zeros((len(now) + 1, *now.shape[1:]))
    gradients = np.zeros_like(activations)
    for is_forward, stages, receivers in steps:
        if is_forward:
            done = np.maximum(now[stages], activations[stages])
            done += forward[stages]
            np.add(done, send_forward[stages], out=activations[receivers])
        else:
            done = np.maximum(now[stages], gradients[_next(stages)])
            done += backward[stages]
            np.add(done, send_backward[stages], out=gradients[receivers])
        now[stages] = done
    return now


class Longest(NamedTuple):
    """A path of waits that ends where it was asked to: how often each stage's times are on it; [stages, pipelines]."""

    forward: Floats
    backward: Floats
    start: Floats
    """1 for the stage whose start it begins with."""


def longest(
    schedule: Schedule,
    micro_batches: int,
    *,
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    start: Floats,
    end: Floats,
) -> Longest:
    """What a stage's end consists of: the chain of passes and messages that it waits for, without a gap.

    `end` is 1 for the stage of each pipeline whose end is asked for, and 0 elsewhere. The times are as for `ends`,
    which is gone through forwards, noting what each pass waits for longest, and then back.
    """
    steps = _steps(schedule, len(forward), micro_batches)
    now = start.copy()
    activations = np.zeros((len(now) + 1, *now.shape[1:]))
    gradients = np.zeros_like(activations)
    waited = []
    for is_forward, stages, receivers in steps:
        message = activations[stages] if is_forward else gradients[_next(stages)]
        waited.append(message > now[stages])
        done = np.maximum(now[stages], message)
        done += (forward if is_forward else backward)[stages]
        if is_forward:
            np.add(done, send_forward[stages], out=activations[receivers])
        else:
            np.add(done, send_backward[stages], out=gradients[receivers])
        now[stages] = done
    here, passes = end.astype(float), (np.zeros_like(now), np.zeros_like(now))
    activations[:], gradients[:] = 0, 0
    for (is_forward, stages, receivers), for_message in zip(reversed(steps), reversed(waited), strict=True):
        messages = activations if is_forward else gradients
        on_path = here[stages] + messages[receivers]
        messages[receivers] = 0
        passes[not is_forward][stages] += on_path
        here[stages] = np.where(for_message, 0, on_path)
        messages[stages if is_forward else _next(stages)] = np.where(for_message, on_path, 0)
    return Longest(forward=passes[0], backward=passes[1], start=here)


def _next(stages: slice) -> slice:
    return slice(stages.start + 1, stages.stop + 1, stages.step)


@lru_cache(maxsize=4096)
def _steps(schedule: Schedule, stages: int, micro_batches: int) -> tuple[Step, ...]:
    if schedule is Schedule.gpipe:
        return tuple(_gpipe(stages, micro_batches))
    if schedule is Schedule.one_f_one_b:
        return tuple(_one_f_one_b(stages, micro_batches))
    raise SearchError(
        f"parallel.schedule={schedule} is not searched; use one of: {', '.join(KNOWN)}. fasop.simulate replays any"
    )


def _gpipe(stages: int, micro_batches: int) -> Iterator[Step]:
    """Forward pass m of stage s in step s + m; backward passes the other way round, after the last forward pass."""
    length = stages + micro_batches - 1
    for step in range(length):
        yield from _step(True, max(0, step - micro_batches + 1), min(step, stages - 1), 1)
    for step in range(length):
        yield from _step(False, max(0, stages - 1 - step), min(stages - 1, stages + micro_batches - 2 - step), 1)


def _one_f_one_b(stages: int, micro_batches: int) -> Iterator[Step]:
    """With n = `stages`: forward pass m of stage s in step s + m while m < n - s, which runs ahead, and in step s + 2m
    after that; backward pass m in step 2n - 1 - s + 2m. A stage's steps alternate, and what a pass waits for is done
    in an earlier step.
    """
    n, last = stages, micro_batches - 1
    for step in range(2 * (n + last)):
        if step < n:
            yield from _step(True, max(0, step - last), step, 1)
        low = max(0, 2 * n - step, step - 2 * last)
        yield from _step(True, low + (low - step) % 2, min(n - 1, step), 2)
        low = max(0, 2 * n - 1 - step)
        yield from _step(False, low + (low - 1 - step) % 2, min(n - 1, 2 * n - 1 - step + 2 * last), 2)


def _step(forward: bool, first: int, last: int, stride: int) -> Iterator[Step]:
    if first <= last:
        stages = slice(first, last + 1, stride)
        yield Step(forward, stages, _next(stages) if forward else stages)
