"""nccl's communicators are made before training, in an order in which no rank waits for one that waits for it."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan_parts import Place
from megatron_ext.engine.executor.messages import channels, warm_up
from megatron_ext.parallel.groups import Groups, Tied

EVEN = [
    (Layout.grid(tensor, data, pipeline), chunks)
    for tensor, data, pipeline, chunks in product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 8), (1, 2))
    if chunks == 1 or pipeline > 1
]
UNLIKE = [
    (Layout(tensors, replicas), 1)
    for stages in (2, 3)
    for tensors, replicas in product(product((1, 2, 4), repeat=stages), product((1, 2, 3), repeat=stages))
    if sum(tensor * count for tensor, count in zip(tensors, replicas, strict=True)) <= 12
]
IN_A_RING = [(Layout(tensors, (2,) * len(tensors)), 2) for tensors in ((2, 1), (1, 2, 4), (4, 1, 1, 2))]
LAYOUTS = EVEN + UNLIKE + IN_A_RING


class Fake:
    """torch.distributed as one rank sees it; `meetings` are the communicators that its messages need, in their order.

    A group is its number and its ranks. Two ranks of it that send each other something unbatched have one of their own.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = tuple(range(world))
        self.made = 0
        self.meetings: list[tuple[object, tuple[int, ...]]] = []

    def new_group(self, ranks: list[int], **_: object) -> tuple[int, tuple[int, ...]]:
        self.made += 1
        return self.made, tuple(ranks)

    def all_reduce(self, _: object, group: Any = None) -> None:
        self.meetings.append(group or (0, self.world))

    def send(self, _: object, peer: int, group: Any = None) -> None:
        assert {self.rank, peer} <= set(group[1])
        self.meetings.append((group[0], (min(self.rank, peer), max(self.rank, peer))))

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("new_group", "all_reduce", "send"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "recv", self.send)
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)


def stuck(meetings: list[list[tuple[object, tuple[int, ...]]]]) -> list[int]:
    """The ranks that never come to the end of their meetings; each begins when all its ranks are there."""
    left = [list(reversed(of_rank)) for of_rank in meetings]
    going_on = True
    while going_on:
        going_on = False
        for of_rank in left:
            while of_rank and all(left[other] and left[other][-1] == of_rank[-1] for other in of_rank[-1][1]):
                for other in of_rank[-1][1]:
                    if left[other] is not of_rank:
                        left[other].pop()
                of_rank.pop()
                going_on = True
    return [rank for rank, of_rank in enumerate(left) if of_rank]


@pytest.mark.parametrize(
    ("layout", "chunks"), LAYOUTS, ids=[f"t{layout.tensors}d{layout.replicas}c{chunks}" for layout, chunks in LAYOUTS]
)
def test_every_group_and_channel_is_connected_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, chunks: int
) -> None:
    meetings = []
    by_node = [
        [group[: len(group) // 2], group[len(group) // 2 :]]
        for group in layout.data_groups()
        if len(group) in (4, 6) and layout.stage_dp_tp(group[0])[0] != 1  # one stage has none
    ]
    ties = [Tied((0, layout.stages - 1), sharded) for sharded in (True, False) if layout.stages > 1]
    for rank in range(layout.world_size):
        fake = Fake(rank, layout.world_size)
        fake.patch(monkeypatch)
        groups = Groups.make(layout, chunks, ties, timedelta(seconds=1), by_node=by_node)
        place = Place(rank, 0, rank, *layout.stage_dp_tp(rank))
        peers = channels(layout, place, chunks, groups)
        warm_up(groups, peers, place, layout.stages, torch.device("cpu"))
        tied = [part.group for parts in groups.tied for part in parts]
        data = (groups.data, *(groups.by_node or ()))
        used = [group for group in (groups.tensor, *data, groups.model, *tied) if group is not None]
        assert set(used) < set(fake.meetings)
        ways = sum(len(way) for ways in peers.values() for way in ways)
        assert len(fake.meetings) == 1 + len(used) + ways == len(set(fake.meetings))
        meetings.append(fake.meetings)
    assert stuck(meetings) == []
