"""How long a plan whose stages differ takes with each of many partitions: as `iteration`, without events.

In which order ranks can take their actions follows from the schedule alone, so it is found once. Each action then is a
few sums and maxima of arrays [partitions].
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fasop.costs.arrays import Floats
from fasop.errors import SearchError
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.iteration import replicated, schedule
from megatron_ext.contract.schedule.replay import Replay
from megatron_ext.contract.schedule.schedules import PARTS, Action, Actions


class Does(IntEnum):
    """What a rank does in a step."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECEIVE = 4
    SEND_FORWARD = 5
    SEND_BACKWARD = 6


_DOES = {
    "forward-compute": Does.FORWARD,
    "backward-compute": Does.BACKWARD,
    "backward-input-compute": Does.BACKWARD_INPUT,
    "backward-weight-compute": Does.BACKWARD_WEIGHT,
    "forward-send": Does.SEND_FORWARD,
    "backward-send": Does.SEND_BACKWARD,
}


class ColumnAction(NamedTuple):
    does: Does
    rank: int
    number: int
    """A pass's chunk, else the message's number."""


class ColumnReplay:
    """The replay of one layout and schedule; every replica of a stage takes `counts` micro-batches where stages have as
    many."""

    def __init__(self, layout: Layout, name: str, counts: Sequence[int], chunks: int = 1) -> None:
        self.layout = layout
        of_all = layout.tensors[0] if len(set(layout.tensors)) == 1 else 1
        self._shown = [rank for rank in range(layout.world_size) if rank % of_all == 0]
        """Ranks of tensor groups that all are of one size do alike."""
        self.steps, self._messages = _ordered(layout, name, tuple(counts), chunks, tuple(self._shown))

    def seconds(self, ranks: Sequence[RankColumns]) -> Floats:
        """[partitions]: from the end of one iteration to the end of the next; `ranks` are all."""
        layout, shown = self.layout, self._shown
        first = np.min([ranks[rank].optimizer for rank in shown], axis=0)
        ends = self._ends(ranks, first)
        summed = []
        for rank in shown:
            stage, _, place = layout.stage_dp_tp(rank)
            group = [layout.rank(stage, replica, place) for replica in range(layout.replicas[stage])]
            summed.append(np.max([ends[other] for other in group], axis=0) + ranks[rank].gradients)
        known: Floats = np.max(summed, axis=0)
        if layout.stages > 1:
            tied = [n for n, rank in enumerate(shown) if layout.stage_dp_tp(rank)[0] in (0, layout.stages - 1)]
            embedding = max(ranks[shown[n]].embedding for n in tied)
            known = np.maximum(known, np.max([summed[n] for n in tied], axis=0) + embedding)
        total: Floats = known + first
        return total

    def _ends(self, ranks: Sequence[RankColumns], first: Floats) -> dict[int, Floats]:
        """When each rank has done its last action."""
        now = {rank: ranks[rank].optimizer - first for rank in self._shown}
        passes = {
            rank: ([*ranks[rank].forward], *([*(part * ranks[rank].backward)] for part in PARTS.values()))
            for rank in self._shown
        }
        sends = {
            rank: (
                (ranks[rank].send_forward, ranks[rank].busy_forward),
                (ranks[rank].send_backward, ranks[rank].busy_backward),
            )
            for rank in self._shown
        }
        free = {(rank, way): np.zeros_like(first) for rank in self._shown for way in (0, 1)}
        one_way = {rank: ranks[rank].one_way_out or self.layout.stages == 2 for rank in self._shown}
        messages: list[Floats] = [first] * self._messages
        maximum, add = np.maximum, np.add
        for does, rank, number in self.steps:
            here = now[rank]
            if does < Does.RECEIVE:
                add(here, passes[rank][does][number], out=here)
            elif does == Does.RECEIVE:
                maximum(here, messages[number], out=here)
            else:
                way = does - Does.SEND_FORWARD
                takes, busy = sends[rank][way]
                link = rank, 0 if one_way[rank] else way
                leaves = maximum(here, free[link])
                free[link] = leaves + busy
                messages[number] = leaves + takes
        return now


def lists_of(layout: Layout, name: str, counts: Sequence[int], chunks: int = 1) -> list[list[Actions]]:
    """Actions by stage and replica; `counts` are the micro-batches of each replica, or the one number of all of them
    where stages have unlike numbers."""
    if not layout.even:
        return replicated(name, layout.replicas, counts[0])
    by_count = {count: schedule(name, layout.stages, chunks, count) for count in set(counts)}
    return [[by_count[count][stage] for count in counts] for stage in range(layout.stages)]


@lru_cache(maxsize=64)
def _ordered(
    layout: Layout, name: str, counts: tuple[int, ...], chunks: int, shown: tuple[int, ...]
) -> tuple[Sequence[ColumnAction], int]:
    """The steps of these ranks, each behind what it waits for, and the number of messages.

    Raises:
        SearchError: the schedule never ends.
    """
    lists = lists_of(layout, name, counts, chunks)
    actions: list[Actions] = [[] for _ in range(layout.world_size)]
    for rank in shown:
        stage, replica, _ = layout.stage_dp_tp(rank)
        actions[rank] = lists[stage][replica]
    order = _Order(layout, actions)
    if order.go_on():
        raise SearchError("the schedule deadlocks: ranks wait for messages that no rank sends")
    return order.steps, order.count


class _Order(Replay):
    """Ranks that write down their steps; a message is its number."""

    def __init__(self, layout: Layout, actions: Sequence[Actions]) -> None:
        super().__init__(layout, actions)
        self.steps: list[ColumnAction] = []
        self.count = 0

    def receive(self, rank: int, action: Action, message: int) -> None:
        self.steps.append(ColumnAction(Does.RECEIVE, rank, message))

    def send(self, rank: int, action: Action) -> int:
        self.steps.append(ColumnAction(_DOES[action.kind], rank, self.count))
        self.count += 1
        return self.count - 1

    def compute(self, rank: int, action: Action) -> None:
        self.steps.append(ColumnAction(_DOES[action.kind], rank, action.chunk))
