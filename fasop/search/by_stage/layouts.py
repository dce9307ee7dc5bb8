"""Which layouts are searched: tensor groups and replicas stage by stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import NamedTuple

from fasop.search.space.candidates import divisors
from megatron_ext.contract.layout import Layout

ALL = 16
"""GPUs: of more there are too many layouts to look at all of them."""
Run = tuple[int, int, int]
"""Stages that are alike, one after another: ranks of a tensor group, replicas, and how many stages."""


class Layouts(NamedTuple):
    """Layouts of all GPUs of some nodes, without those whose stages are all alike."""

    every: Sequence[Layout]
    said: str
    """In words, which these are."""


def layouts(gpus: int, node: int, tensors: Sequence[int], stages: int, most: int) -> Layouts:
    """The largest of some sets of layouts that has no more than `most`.

    Args:
        node: GPUs of a node; where nodes differ, a number that divides all of theirs.
        tensors: sizes of a tensor group that are possible.
        stages: at most.
    """
    whole = [cut for cut in range(gpus + 1) if cut % node == 0 or min(cut, gpus - cut) in _small(node)]
    anywhere = range(gpus + 1)
    quarters = sorted({0, gpus, *(gpus * part // 4 // node * node for part in (1, 2, 3))})
    few = {*_small(node), node}
    ends = sorted({0, gpus, *few, *(gpus - size for size in few)} & {*anywhere})
    at_nodes = "with changes where a node ends, or few GPUs from either end"
    at_ends = "three with changes near both ends"

    def three_near_ends(cuts: Sequence[int]) -> Iterator[tuple[Run, ...]]:
        yield from dict.fromkeys(
            chain(_in_runs(gpus, cuts, tensors, stages, 2), _in_runs(gpus, ends, tensors, stages, 3))
        )

    ways: list[tuple[Callable[[], Iterator[tuple[Run, ...]]], str]] = [
        *([(partial(_all, gpus, tensors, stages), "all")] if gpus <= ALL else []),
        (
            partial(_in_runs, gpus, anywhere, tensors, stages, 3),
            "at most three kinds of stages in a row",
        ),
        (
            partial(_in_runs, gpus, whole, tensors, stages, 3),
            f"at most three kinds of stages in a row, {at_nodes}",
        ),
        (partial(three_near_ends, anywhere), f"two kinds of stages in a row, or {at_ends}"),
        (partial(_in_runs, gpus, anywhere, tensors, stages, 2), "two kinds of stages in a row"),
        (partial(three_near_ends, whole), f"two kinds of stages in a row, {at_nodes}, or {at_ends}"),
        (
            partial(_in_runs, gpus, whole, tensors, stages, 2),
            f"two kinds of stages in a row, {at_nodes}",
        ),
        (
            partial(_in_runs, gpus, quarters, tensors, stages, 2),
            "two kinds of stages for quarters of the GPUs",
        ),
    ]
    for way, said in ways:
        found = [*islice(way(), most + 1)]
        if len(found) <= most:
            return Layouts([*map(_layout, found)], said)
    return Layouts([*map(_layout, found[:most])], f"the first {most} of {ways[-1][1]}")


def _layout(runs: Sequence[Run]) -> Layout:
    return Layout(
        tuple(chain.from_iterable(repeat(tensor, count) for tensor, _, count in runs)),
        tuple(chain.from_iterable(repeat(replicas, count) for _, replicas, count in runs)),
    )


def _small(node: int) -> set[int]:
    """Numbers of GPUs that the first and the last stage may have of a node."""
    return {size for size in (1, 2, 4) if size < node}


def _all(gpus: int, tensors: Sequence[int], stages: int) -> Iterator[tuple[Run, ...]]:
    """Stage by stage."""
    sizes = [(t, width // t, width) for width in range(1, gpus + 1) for t in tensors if width % t == 0]

    def rest(left: int, room: int) -> Iterator[tuple[Run, ...]]:
        if left == 0:
            yield ()
        elif room:
            for tensor, replicas, width in sizes:
                if width <= left:
                    yield from (((tensor, replicas, 1), *others) for others in rest(left - width, room - 1))

    for found in rest(gpus, stages):
        if len(set(found)) > 1:
            yield found


def _in_runs(
    gpus: int, cuts: Sequence[int], tensors: Sequence[int], stages: int, most: int
) -> Iterator[tuple[Run, ...]]:
    ends, known = sorted(cuts), dict[int, list[Run]]()

    def runs(width: int) -> list[Run]:
        if width not in known:
            known[width] = [
                (tensor, replicas, width // tensor // replicas)
                for tensor in tensors
                if width % tensor == 0
                for replicas in divisors(width // tensor)
            ]
        return known[width]

    def rest(begin: int, room: int, before: tuple[int, int], left: int) -> Iterator[tuple[Run, ...]]:
        for end in ends[bisect_right(ends, begin) :] if room > 1 else [gpus] * room:
            for run in runs(end - begin):
                if run[:2] == before or run[2] > left:
                    continue
                if end == gpus:
                    yield (run,)
                else:
                    yield from ((run, *others) for others in rest(end, room - 1, run[:2], left - run[2]))

    for found in rest(0, most, (0, 0), stages):
        if len(found) > 1:
            yield found
