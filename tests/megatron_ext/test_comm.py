"""Messages are kept as long as they need to be, and no longer."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_ext.comm import Outbox, Peer
from megatron_ext.errors import PeerLost


class Sending:
    """A send under way."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False

    def is_completed(self) -> bool:
        return self.done or self.failed

    def wait(self) -> None:
        if self.failed:
            raise RuntimeError("connection closed by peer\nand more")
        self.done = True


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Sending]:
    started: list[Sending] = []

    def isend(tensor: torch.Tensor, rank: int, group: object) -> Sending:
        started.append(Sending())
        return started[-1]

    monkeypatch.setattr(dist, "isend", isend)
    return started


def test_a_tensor_is_kept_until_it_was_sent(works: list[Sending]) -> None:
    outbox = Outbox(Peer(3, None), "activations")

    def put() -> weakref.ref:
        tensor = torch.zeros(2)
        outbox.put(tensor)
        return weakref.ref(tensor)

    kept = [put() for _ in range(3)]
    works[0].done = True
    kept.append(put())
    assert [tensor() is not None for tensor in kept] == [False, True, True, True]
    outbox.flush()
    assert all(work.done for work in works)
    assert not any(tensor() is not None for tensor in kept)


def test_a_send_that_failed_meanwhile_is_told_at_the_next_one(works: list[Sending]) -> None:
    outbox = Outbox(Peer(3, None), "activations")
    outbox.put(torch.zeros(2))
    works[0].failed = True
    with pytest.raises(PeerLost, match=r"activations to rank 3 failed: connection closed by peer$"):
        outbox.put(torch.zeros(2))
