"""How long a plan whose stages differ takes with each of many partitions: as `iteration`, without events.

In which order ranks can take their actions follows from the schedule alone, so it is found once. Each action then is a
few sums and maxima of arrays [partitions]. Where `fasop.compiled` was built, it does the same for eight
partitions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import ranks as compiled
from fasop.costs.arrays import Floats, Integers
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
        self._stages = [layout.stage_dp_tp(rank)[0] for rank in self._shown]
        tensors = (1,) * layout.stages if of_all > 1 else layout.tensors
        self.steps, self._messages = _ordered(Layout(tensors, layout.replicas), name, tuple(counts))

    def seconds(self, ranks: Sequence[RankColumns]) -> Floats:
        """[partitions]: from the end of one iteration to the end of the next; `ranks` are all."""
        count = len(ranks[0].optimizer)
        return self.of_layers(self.tables(ranks), np.broadcast_to(np.arange(count), (self.layout.stages, count)))

    def tables(self, ranks: Sequence[RankColumns]) -> RankTables:
        """Return what these take, which are all ranks, for `of_layers`."""
        layout, shown = self.layout, [(self._stages[at], ranks[rank]) for at, rank in enumerate(self._shown)]
        different = {(stage, id(one)): one for stage, one in shown}
        numbers = {key: number for number, key in enumerate(different)}
        row, every = np.array([numbers[stage, id(one)] for stage, one in shown], np.intc), [*different.values()]
        send, busy = (
            np.array([[getattr(one, f"{what}_{way}") for way in ("forward", "backward")] for one in every])
            for what in ("send", "busy")
        )
        one_way, places = [one.one_way_out or layout.stages == 2 for _, one in shown], np.arange(len(shown))
        return RankTables(
            compute=np.array([[one.forward[0], *(part * one.backward[0] for part in PARTS.values())] for one in every]),
            send=send,
            busy=busy,
            ends=np.array([[one.optimizer, one.gradients] for one in every]),
            embedding=max(one.embedding for stage, one in shown if stage in (0, layout.stages - 1)),
            stage=np.array([stage for stage, _ in different], np.intc),
            row=row,
            link=np.array([places, np.where(one_way, places, places + len(shown))], np.intc),
        )

    def of_layers(self, tables: RankTables, layers: Integers) -> Floats:
        """[partitions]: the same of partitions whose stages take what these columns of the tables have, [stages,
        partitions]."""
        replay = compiled.rank_seconds if hasattr(compiled, "rank_seconds") else _replayed
        return replay(self.steps, self._messages, *tables, layers)


class RankTables(NamedTuple):
    """What ranks take, in seconds. A row is of ranks that do alike, a column of some number of layers, or of a
    partition."""

    compute: Floats
    """[rows, kinds of passes, columns]"""
    send: Floats
    """[rows, 2, columns]: what a message takes forward and backward."""
    busy: Floats
    """[rows, 2, columns]: for how long it occupies its link."""
    ends: Floats
    """[rows, 2, columns]: the optimizer's step, with which a rank begins, and the sums of gradients at its end."""
    embedding: float
    """The sum of its gradients by the first and the last stage, where there are several."""
    stage: Ints
    """[rows]: whose times a row has."""
    row: Ints
    """[ranks]: which row has a rank's times."""
    link: Ints
    """[2, ranks]: the number of the link of a rank's messages."""


def _replayed(
    steps: Steps,
    messages: int,
    compute: Floats,
    send: Floats,
    busy: Floats,
    ends: Floats,
    embedding: float,
    stage: Ints,
    row: Ints,
    link: Ints,
    layers: Integers,
) -> Floats:
    """[partitions]: what `ColumnReplay.of_layers` does, with the steps, and how many messages there are."""
    rows = np.arange(len(stage))[:, np.newaxis]
    compute, send, busy, ends = (  # [kinds, rows, partitions]
        np.moveaxis(part, 1, 0)[:, rows, layers[stage]] for part in (compute, send, busy, ends)
    )
    first = ends[0].min(axis=0)
    now, free = ends[0, row] - first, np.zeros((2 * len(row), len(first)))
    there = np.empty((messages, len(first)))
    for does, rank, message in steps.tolist():
        here = now[rank]
        if does < Does.RECEIVE:
            here += compute[does, row[rank]]
        elif does == Does.RECEIVE:
            np.maximum(here, there[message], out=here)
        else:
            way = does - Does.SEND_FORWARD
            leaves = np.maximum(here, free[link[way, rank]])
            free[link[way, rank]] = leaves + busy[way, row[rank]]
            there[message] = leaves + send[way, row[rank]]
    stages = range(len(layers))
    summed = [now[stage[row] == one].max(axis=0) + ends[1, stage == one].max(axis=0) for one in stages]
    known: Floats = np.max(summed, axis=0)
    if len(layers) > 1:
        known = np.maximum(known, np.maximum(summed[0], summed[-1]) + embedding)
    return known + first


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
        passes = _passes(layout, name, counts)
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


def _passes(layout: Layout, name: str, counts: tuple[int, ...]) -> list[Steps]:
    """[ranks][passes, 2]: the kind and the number of each pass of a rank, as in `lists_of`; micro-batches of a replica
    are counted from 0."""
    found, until = list[Steps](), [0, *accumulate(layout.replicas)]
    for stage, (tensor, own) in enumerate(zip(layout.tensors, layout.replicas, strict=True)):
        if layout.even:
            of_stage = [_passes_of_rank(name, layout.stages - 1 - stage, stage, count) for count in counts]
        else:
            after, before = (until[-1] - until[stage] - 1) // own, until[stage] // own
            each = (len(range(replica, counts[0], own)) for replica in range(own))
            of_stage = [_passes_of_rank(name, after, before, count) for count in each]
        found += [passes for passes in of_stage for _ in range(tensor)]
    return found


@lru_cache(maxsize=4096)
def _passes_of_rank(name: str, after: int, before: int, count: int) -> Steps:
    """[passes, 2]: the kind and the micro-batch of each."""
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
