"""Simulates one schedule for thousands of pipelines at once: exactly what `simulate` says, many times faster.

All actions of a step (`fasop.steps`) are done together as rows of an array, and all pipelines as its columns; how long
they really take only enters by the maximum of what an action waits for. 1F1B has a simulation of its own
(`fasop.alternating`): it costs some 6 (micro-batches + stages) operations of numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.schema import Schedule
from fasop import alternating
from fasop.steps import Pass, Steps, steps

Floats = NDArray[np.float64]

KNOWN = tuple(Schedule)


class Times(NamedTuple):
    """What stages take for one micro-batch."""

    forward: Floats
    """[parts, pipelines]; part c * stages + s is chunk c of stage s."""
    backward: Floats
    """Likewise; of a split backward pass each half takes half of it."""
    send_forward: Floats
    """[stages, pipelines]: from the end of a forward pass until the following stage has its result."""
    send_backward: Floats
    """Likewise, until the stage before has it."""
    start: Floats
    """[stages, pipelines]: when a stage begins."""


def ends(schedule: Schedule, micro_batches: int, times: Times) -> Floats:
    """[stages, pipelines]: when each stage has done its last action."""
    if schedule is Schedule.one_f_one_b:
        return alternating.ends(micro_batches, times)
    plan, compute, send = _prepared(schedule, micro_batches, times)
    now = times.start.copy()
    messages = np.zeros((plan.slots, *now.shape[1:]))
    for kind, stages, parts, reads, writes in plan.steps:
        done = now[stages]
        if kind is Pass.WEIGHT:
            done += compute[kind][parts]
            continue
        np.maximum(done, messages[reads], out=done)
        done += compute[kind][parts]
        np.add(done, send[kind][stages], out=messages[writes])
    return now


class Longest(NamedTuple):
    """The chain of passes and messages, each waiting for the one before, that ends last: how often a pass is on it."""

    forward: Floats
    """[parts, pipelines]"""
    backward: Floats
    """[parts, pipelines]; half a pass counts one half."""
    start: Floats
    """[stages, pipelines]: 1 for the stage whose start it begins with."""
    end: Floats
    """[stages, pipelines]: 1 for the stage with whose last action it ends."""
    total: Floats
    """[pipelines]: when it ends, with what comes after."""


def longest(schedule: Schedule, micro_batches: int, times: Times, after: Floats) -> Longest:
    """Why the iteration takes so long, if `after` [stages, pipelines] comes after each stage's last action.

    The schedule is gone through forwards as in `ends`, noting what each pass waits for longest, and then back.
    """
    if schedule is Schedule.one_f_one_b:
        return _alternating(micro_batches, times, after)
    plan, compute, send = _prepared(schedule, micro_batches, times)
    now = times.start.copy()
    messages = np.zeros((plan.slots, *now.shape[1:]))
    waited, nothing = [], np.zeros(0, bool)
    for kind, stages, parts, reads, writes in plan.steps:
        done = now[stages]
        if kind is Pass.WEIGHT:
            waited.append(nothing)
            done += compute[kind][parts]
            continue
        message = messages[reads]
        waited.append(message > done)
        np.maximum(done, message, out=done)
        done += compute[kind][parts]
        np.add(done, send[kind][stages], out=messages[writes])
    now += after
    end = np.zeros_like(now)
    end[np.argmax(now, axis=0), np.arange(now.shape[1])] = 1
    here, passes = end.copy(), np.zeros((2, *times.forward.shape))
    messages[:] = 0
    for (kind, stages, parts, reads, writes), for_message in zip(reversed(plan.steps), reversed(waited), strict=True):
        if kind is Pass.WEIGHT:
            passes[1][parts] += 0.5 * here[stages]
            continue
        on_path = here[stages] + messages[writes]
        messages[writes] = 0
        passes[min(kind, 1)][parts] += on_path if kind is not Pass.INPUT else 0.5 * on_path
        here[stages] = np.where(for_message, 0, on_path)
        messages[reads] = np.where(for_message, on_path, 0)
    return Longest(forward=passes[0], backward=passes[1], start=here, end=end, total=now.max(axis=0))


def _alternating(micro_batches: int, times: Times, after: Floats) -> Longest:
    path, now = alternating.path(micro_batches, times, after)
    every, start, end = np.arange(now.shape[1]), np.zeros_like(now), np.zeros_like(now)
    start[path.start, every] = end[np.argmax(now, axis=0), every] = 1
    return Longest(forward=path.forward, backward=path.backward, start=start, end=end, total=now.max(axis=0))


def _prepared(
    schedule: Schedule, micro_batches: int, times: Times
) -> tuple[Steps, tuple[Floats, ...], tuple[Floats, ...]]:
    """The steps, and by kind of pass what it takes and what sending its result takes."""
    stages = len(times.start)
    plan = steps(schedule, stages, len(times.forward) // stages, micro_batches)
    half = 0.5 * times.backward
    return plan, (times.forward, times.backward, half, half), (times.send_forward, *3 * (times.send_backward,))
