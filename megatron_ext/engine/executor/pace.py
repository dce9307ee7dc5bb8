"""Keeps a GPU's host near: it queues a few passes ahead, and notices when the GPU does not come on.

nccl's `wait` makes only the GPU wait. A host that nothing holds back would queue a whole iteration at once: with all
received and sent messages in memory at a time, since what another stream uses is free only when the host sees that it
was used. And it would not notice a lost rank before it reads a result; torch's own watchdog counts from when a message
was queued, and looks at none between two ranks before torch 2.2.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import Deque, Tuple

import torch

from megatron_ext.contract.errors import PeerLost
from megatron_ext.timeline.progress import Wait

PASSES_AHEAD = 4
"""So that the GPU has work while the host sleeps."""
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 200e-6


def messages_timeout(device: torch.device, patience_s: float) -> timedelta:
    """How long a message may take until the communication library gives up.

    With nccl it counts from when the message was queued, which is up to `PASSES_AHEAD` passes before it can begin.
    """
    return timedelta(seconds=patience_s * (PASSES_AHEAD + 1 if device.type == "cuda" else 1))


class Pace:
    """Holds a rank's host back. On a CPU, where passes and messages make it wait by themselves, it does nothing."""

    def __init__(self, device: torch.device, patience_s: float) -> None:
        """`patience_s` is what a pass may take with the wait for its message."""
        self._cuda = device.type == "cuda"
        self._patience_s = patience_s
        self._queued: Deque[Tuple[torch.cuda.Event, str]] = deque()

    def passed(self, name: str, micro_batch: int) -> None:
        """Called when a pass has been queued; waits until the GPU is at most `PASSES_AHEAD` passes behind. Raises
        PeerLost: the GPU does not come on."""
        if self._cuda:
            self._mark(f"{name} of micro-batch {micro_batch}")
            if len(self._queued) > PASSES_AHEAD:
                self._reach(*self._queued.popleft())

    def finished(self) -> None:
        """Called when all passes and messages have been queued; waits until the GPU has come to their end. Raises
        PeerLost: the GPU does not come on."""
        if self._cuda:
            self._mark("the last message")
            while self._queued:
                self._reach(*self._queued.popleft())

    def _mark(self, what: str) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._queued.append((event, what))

    def _reach(self, event: torch.cuda.Event, what: str) -> None:
        until = time.monotonic() + self._patience_s
        sleep_s = _SHORTEST_SLEEP_S
        with Wait(f"{what} on its GPU"):
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until:
                    raise PeerLost(
                        f"{what} did not end on the GPU within train.comm_timeout_s={self._patience_s:g}: "
                        "another rank is gone or hangs, or a pass and the wait for its message take longer"
                    )
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
