"""Messages are kept as long as they need to be, and no longer."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_ext.contract.errors import PeerLost
from megatron_ext.parallel import comm
from megatron_ext.parallel.comm import Inbox, Outbox, Peer, annotate_errors


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


@pytest.mark.parametrize(("bytes_ahead", "posted"), [(1, [1, 1, 1, 0]), (16, [2, 2, 1, 0]), (1000, [3, 2, 1, 0])])
def test_receives_are_posted_ahead_as_far_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, bytes_ahead: int, posted: list[int]
) -> None:
    sent = [torch.full((2,), float(number)) for number in range(3)]
    waiting = 0

    class Receiving:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.message = tensor, sent.pop(0)

        def wait(self) -> None:
            nonlocal waiting
            waiting -= 1
            self.tensor.copy_(self.message)

    def irecv(tensor: torch.Tensor, rank: int, group: object) -> Receiving:
        nonlocal waiting
        waiting += 1
        return Receiving(tensor)

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(comm, "AHEAD_BYTES", bytes_ahead)
    inbox = Inbox(Peer(3, None), "activations", True)
    inbox.expect([torch.empty(2)] * 3)
    found = [waiting]
    for number in range(3):
        assert inbox.take().tolist() == [number, number]
        found.append(waiting)
    assert found == posted


NCCL_ERROR = """NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled system error, NCCL version 2.18.1
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Call to connect returned Connection refused"""


def test_what_nccl_says_last_is_told() -> None:
    with (
        pytest.raises(PeerLost, match=r"^meeting failed: NCCL: Call to connect returned Connection refused$"),
        annotate_errors("meeting"),
    ):
        raise RuntimeError(NCCL_ERROR)


def test_memory_that_ran_out_is_no_lost_peer() -> None:
    error = RuntimeError(
        NCCL_ERROR.replace("Call to connect returned Connection refused", "Cuda failure 2 'out of memory'")
    )
    with pytest.raises(RuntimeError) as raised, annotate_errors("meeting"):
        raise error
    assert raised.value is error
