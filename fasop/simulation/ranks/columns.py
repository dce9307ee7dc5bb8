"""How long a plan whose stages differ takes with each of many partitions: as `iteration`, without events.

In which order ranks can take their actions follows from the schedule alone, so it is found once. Each action then is a
few sums and maxima of arrays [partitions]. Where `fasop.compiled` was built, it does the same for eight
partitions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import ranks as compiled
from fasop.costs.arrays import Floats
from fasop.errors import SearchError
from fasop.simulation.ranks.heterogeneous_stages import RankColumns
from fasop.simulation.steps import PASSES
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.schedule.iteration import replicated, schedule
from megatron_ext.contract.schedule.replay import Replay
from megatron_ext.contract.schedule.schedules import PARTS, SCHEDULES, Action, Actions

Steps = NDArray[np.intc]
"""[steps, 3]: what is done, by which of the ranks shown, and the number of the message; 0 of a pass."""
Ints = NDArray[np.intc]


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


class ColumnReplay:
    """The replay of one layout and schedule, of stages with one chunk; every replica of a stage takes `counts`
    micro-batches where stages have as many."""

    def __init__(self, layout: Layout, name: str, counts: Sequence[int]) -> None:
        self.layout = layout
        of_all = layout.tensors[0] if len(set(layout.tensors)) == 1 else 1
        self._shown = [rank for rank in range(layout.world_size) if rank % of_all == 0]
        """Ranks of tensor groups that all are of one size do alike."""
        tensors = (1,) * layout.stages if of_all > 1 else layout.tensors
        self.steps, self._messages = _ordered(Layout(tensors, layout.replicas), name, tuple(counts))

    def seconds(self, ranks: Sequence[RankColumns]) -> Floats:
        """[partitions]: from the end of one iteration to the end of the next; `ranks` are all."""
        layout, shown = self.layout, [ranks[rank] for rank in self._shown]
        first = np.min([one.optimizer for one in shown], axis=0)
        ends = self._ends(shown, first)
        stages = [layout.stage_dp_tp(rank)[0] for rank in self._shown]
        begins = [stages.index(stage) for stage in range(layout.stages)]
        summed = np.maximum.reduceat(ends, begins, axis=0)
        summed += np.maximum.reduceat([one.gradients for one in shown], begins, axis=0)
        known: Floats = summed.max(axis=0)
        if layout.stages > 1:
            embedding = max(one.embedding for stage, one in zip(stages, shown, strict=True) if stage in (0, stages[-1]))
            known = np.maximum(known, np.maximum(summed[0], summed[-1]) + embedding)
        return known + first

    def _ends(self, shown: Sequence[RankColumns], first: Floats) -> Floats:
        """[ranks, partitions]: when each rank has done its last action."""
        different = {id(one): one for one in shown}
        numbers = {key: number for number, key in enumerate(different)}
        row = np.array([numbers[id(one)] for one in shown], np.intc)
        every = [*different.values()]
        times = np.array([[one.forward[0], *(part * one.backward[0] for part in PARTS.values())] for one in every])
        send, busy = (
            np.array([[getattr(one, f"{what}_{way}") for way in ("forward", "backward")] for one in every])
            for what in ("send", "busy")
        )
        start = np.array([one.optimizer for one in every])[row] - first
        one_way, ranks = [one.one_way_out or self.layout.stages == 2 for one in shown], np.arange(len(shown))
        link = np.array([ranks, np.where(one_way, ranks, ranks + len(shown))], np.intc)
        replay = compiled.rank_ends if hasattr(compiled, "rank_ends") else _replayed
        return replay(self.steps, self._messages, times, send, busy, start, row, link)


def _replayed(
    steps: Steps, messages: int, times: Floats, send: Floats, busy: Floats, start: Floats, row: Ints, link: Ints
) -> Floats:
    """[ranks, partitions]: when each rank has done its last step.

    Args:
        messages: how many there are.
        times: [rows, kinds of passes, partitions]
        send: [rows, 2, partitions]: what a message takes forward and backward.
        busy: [rows, 2, partitions]: for how long it occupies its link.
        start: [ranks, partitions]
        row: [ranks]: which row has a rank's times.
        link: [2, ranks]: the number of the link of a rank's messages.
    """
    now, free = start.copy(), np.zeros((2 * len(row), start.shape[1]))
    there = np.empty((messages, start.shape[1]))
    for does, rank, message in steps.tolist():
        here = now[rank]
        if does < Does.RECEIVE:
            here += times[row[rank], does]
        elif does == Does.RECEIVE:
            np.maximum(here, there[message], out=here)
        else:
            way = does - Does.SEND_FORWARD
            leaves = np.maximum(here, free[link[way, rank]])
            free[link[way, rank]] = leaves + busy[row[rank], way]
            there[message] = leaves + send[row[rank], way]
    return now


def lists_of(layout: Layout, name: str, counts: Sequence[int]) -> list[list[Actions]]:
    """Actions by stage and replica; `counts` are the micro-batches of each replica, or the one number of all of them
    where stages have unlike numbers."""
    if not layout.even:
        return replicated(name, layout.replicas, counts[0])
    by_count = {count: schedule(name, layout.stages, 1, count) for count in set(counts)}
    return [[by_count[count][stage] for count in counts] for stage in range(layout.stages)]


@lru_cache(maxsize=64)
def _ordered(layout: Layout, name: str, counts: tuple[int, ...]) -> tuple[Steps, int]:
    """The steps of all ranks, each behind what it waits for, and the number of messages. Raises SearchError: the
    schedule never ends."""
    places = [layout.stage_dp_tp(rank) for rank in range(layout.world_size)]
    if hasattr(compiled, "rank_steps"):
        passes = [_passes(layout, name, counts, stage, replica) for stage, replica, _ in places]
        at, tensors, replicas = (np.array(numbers, np.intc) for numbers in (places, layout.tensors, layout.replicas))
        try:
            return compiled.rank_steps(passes, at, tensors, replicas, max(counts)), 2 * len(places) * max(counts)
        except ValueError as error:
            raise SearchError(f"{error}: ranks wait for messages that no rank sends") from error
    lists = lists_of(layout, name, counts)
    order = _Order(layout, [lists[stage][replica] for stage, replica, _ in places])
    if order.go_on():
        raise SearchError("the schedule deadlocks: ranks wait for messages that no rank sends")
    return np.array(order.steps, np.intc), order.count


def _passes(layout: Layout, name: str, counts: Sequence[int], stage: int, replica: int) -> Steps:
    """[passes, 2]: the kind and the micro-batch of each pass of a rank, as in `lists_of`."""
    own, replicas = layout.replicas[stage], layout.replicas
    if layout.even:
        return _passes_of_rank(name, layout.stages - 1 - stage, stage, counts[replica])
    after, before = (sum(replicas[stage:]) - 1) // own, sum(replicas[:stage]) // own
    found = _passes_of_rank(name, after, before, len(range(replica, counts[0], own)))
    return np.asarray(found * np.array([1, own], np.intc) + np.array([0, replica], np.intc))


@lru_cache(maxsize=4096)
def _passes_of_rank(name: str, after: int, before: int, count: int) -> Steps:
    """The same with micro-batches numbered from 0."""
    passes = SCHEDULES[name].passes_of_rank(after, before, count)
    return np.array([(PASSES[action.kind], action.micro_batch) for action in passes], np.intc)


class _Order(Replay):
    """Ranks that write down their steps; a message is its number."""

    def __init__(self, layout: Layout, actions: Sequence[Actions]) -> None:
        super().__init__(layout, actions)
        self.steps: list[tuple[int, int, int]] = []
        self.count = 0

    def receive(self, rank: int, action: Action, message: int) -> None:
        self.steps.append((Does.RECEIVE, rank, message))

    def send(self, rank: int, action: Action) -> int:
        self.steps.append((_DOES[action.kind], rank, self.count))
        self.count += 1
        return self.count - 1

    def compute(self, rank: int, action: Action) -> None:
        self.steps.append((_DOES[action.kind], rank, 0))
