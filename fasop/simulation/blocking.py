"""1F1B as Megatron-LM runs it, for many pipelines at once: stages wait until what they send has arrived.

A message is a meeting of two neighbours, and so are the two that they exchange once both alternate: each goes on when
both have come and the messages have gone over. With n stages, stage s does n - 1 - s forward passes before it
alternates. Between two passes it first sends and then receives, but for exchanges; so meetings of neighbours follow
one another along the pipeline.

Interleaved stages, which have several chunks, wait as in `fasop.simulation.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats
from fasop.simulation import rendezvous
from fasop.simulation.vectorised import Longest, Times, last_of


class LinkKind(IntEnum):
    FORWARD = 0
    """A pass."""
    BACKWARD = 1
    AHEAD = 2
    """A meeting: activations go from a stage to the next one."""
    BACK = 3
    """Gradients come from the next stage."""
    BOTH = 4


class LinkStep(NamedTuple):
    kind: LinkKind
    stages: slice
    """That do a pass, or that meet the stage after each of them."""


@lru_cache(maxsize=4096)
def steps(stages: int, micro_batches: int) -> tuple[LinkStep, ...]:
    """In an order in which each stage's own are in theirs."""
    left = [list(reversed(_of_stage(stage, stages, micro_batches))) for stage in range(stages)]
    found: list[LinkStep] = []
    while any(left):
        coming = [own[-1] if own else None for own in left]
        for kind in LinkKind:
            if kind in (LinkKind.FORWARD, LinkKind.BACKWARD):
                ready = [s for s, one in enumerate(coming) if one == (kind, s)]
            else:
                ready = [s for s in range(stages - 1) if coming[s] == coming[s + 1] == (kind, s)]
            for s in ready:
                left[s].pop()
                if kind not in (LinkKind.FORWARD, LinkKind.BACKWARD):
                    left[s + 1].pop()
            found += (LinkStep(kind, part) for part in _slices(ready))
    return tuple(found)


def _of_stage(stage: int, stages: int, micro_batches: int) -> list[tuple[LinkKind, int]]:
    """Passes with the stage's own number, and meetings with the number of the first of the two."""
    ahead = min(stages - 1 - stage, micro_batches)
    before, after = stage - 1, stage
    found: list[tuple[LinkKind, int]] = []
    for _ in range(ahead):
        found += [(LinkKind.AHEAD, before), (LinkKind.FORWARD, stage), (LinkKind.AHEAD, after)]
    both = micro_batches - ahead
    found += [(LinkKind.AHEAD, before)] * (both > 0)
    for number in range(both):
        found += [(LinkKind.FORWARD, stage), (LinkKind.BOTH, after), (LinkKind.BACKWARD, stage)]
        found += [(LinkKind.BOTH if number < both - 1 else LinkKind.BACK, before)]
    for _ in range(ahead):
        found += [(LinkKind.BACK, after), (LinkKind.BACKWARD, stage), (LinkKind.BACK, before)]
    return [one for one in found if one[0] < LinkKind.AHEAD or 0 <= one[1] < stages - 1]


def _slices(numbers: Sequence[int]) -> Iterator[slice]:
    """Yield as few slices as it takes."""
    begin = 0
    while begin < len(numbers):
        stride = numbers[begin + 1] - numbers[begin] if begin + 1 < len(numbers) else 1
        end = begin + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == stride:
            end += 1
        yield slice(numbers[begin], numbers[end - 1] + 1, stride)
        begin = end


def ends(micro_batches: int, times: Times) -> Floats:
    """[stages, pipelines]: when each stage has done its last action."""
    if len(times.forward) > len(times.start):
        return rendezvous.ends(micro_batches, times)
    return _run(micro_batches, times)


def _run(micro_batches: int, times: Times, second_last: list[NDArray[np.bool_]] | None = None) -> Floats:
    """`ends`; appends of each meeting whether the second of the two came last."""
    now, takes = times.start.copy(), _takes(times)
    for kind, stages in steps(len(now), micro_batches):
        if kind < LinkKind.AHEAD:
            now[stages] += takes[kind][stages]
            continue
        others = _following(stages)
        if second_last is not None:
            second_last.append(now[others] > now[stages])
        both = np.maximum(now[stages], now[others])
        both += takes[kind][stages]
        now[stages] = now[others] = both
    return now


def longest(micro_batches: int, times: Times, after: Floats) -> Longest:
    """Why the iteration takes so long, if `after` [stages, pipelines] comes after each stage's last action."""
    if len(times.forward) > len(times.start):
        return rendezvous.longest(micro_batches, times, after)
    second_last: list[NDArray[np.bool_]] = []
    now = _run(micro_batches, times, second_last) + after
    end = last_of(now)
    here, passes = end.copy(), np.zeros((2, *now.shape))
    for kind, stages in reversed(steps(len(now), micro_batches)):
        if kind < LinkKind.AHEAD:
            passes[kind][stages] += here[stages]
            continue
        others = _following(stages)
        second, on_path = second_last.pop(), here[stages] + here[others]
        here[stages], here[others] = np.where(second, 0, on_path), np.where(second, on_path, 0)
    return Longest(forward=passes[0], backward=passes[1], start=here, end=end, total=now.max(axis=0))


def _following(stages: slice) -> slice:
    return slice(stages.start + 1, stages.stop + 1, stages.step)


def _takes(times: Times) -> tuple[Floats, ...]:
    """Return what each kind of step takes; a meeting is in the row of its first stage."""
    back = np.roll(times.send_backward, -1, axis=0)
    return times.forward, times.backward, times.send_forward, back, np.maximum(times.send_forward, back)
