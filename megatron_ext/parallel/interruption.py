"""Being asked to save and end: SIGUSR2, by which Slurm announces a time limit or a preemption.

The signal reaches the ranks at different moments, or only some of them. All end after the same iteration, because
each tells the others at every iteration whether it was asked.
"""

from __future__ import annotations

import signal
from collections import deque
from contextlib import nullcontext
from types import FrameType
from typing import ContextManager, Deque, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.comm import annotate_errors

SIGNAL = signal.SIGUSR2
DISK, MEMORY, _KINDS = 1, 2, 4
"""What to save: a checkpoint on disk, one in the memory of nodes; 3 is both."""
ASKED, SPENT = 1, 2
"""Why all ranks end: one of them was asked to; the run has cost what it may."""

_asked = False


class Interrupted(Exception):
    """Training ended early, on request; its checkpoint is on disk."""


def listen() -> None:
    """Has the signal remembered from now on, instead of ending this process."""
    signal.signal(SIGNAL, _note)


def asked() -> bool:
    """Whether the signal came."""
    return _asked


def _note(_signum: int, _frame: Optional[FrameType]) -> None:
    global _asked
    _asked = True


class Interruption:
    """What the ranks tell each other. The message of one iteration is read some iterations later, so nobody waits for
    it."""

    def __init__(self, device: torch.device, later: int = 1) -> None:
        """`later` is by how many iterations ranks are apart, or 1."""
        self._device = device
        self._later = later
        self._said: Deque[Tuple[Tensor, dist.Work]] = deque()
        self.wanted = 0
        """What rank 0 wanted all ranks to save, as far as the last `agreed` has read: some of `DISK` and `MEMORY`."""
        self._aside: ContextManager[object] = nullcontext()
        """There a GPU reads the message without waiting for what it trains."""
        if device.type == "cuda":
            self._aside = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def agreed(self, own: int = 0, save: int = 0) -> int:
        """Called by all ranks after each iteration: why they end, as one of them had it so many iterations before; 0 if
        they go on. `own` is this rank's reason, beside that it was asked to; `save` is what all are to save.

        Raises:
            PeerLost: another rank is gone.
        """
        self.wanted = 0
        before = self._read() if len(self._said) == self._later else 0
        # The largest one counts. Whoever ends saves, too, so that may hide that one wants to save.
        said = _KINDS * max(own, ASKED if _asked else 0) + save
        flag = torch.full((1,), said, dtype=torch.int32, device=self._device)
        with annotate_errors("agreeing on whether to stop"):
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._said.append((flag, work))
        return before

    def finish(self) -> None:
        """Waits for the last messages."""
        while self._said:
            self._read()

    def _read(self) -> int:
        flag, work = self._said.popleft()
        with self._aside, annotate_errors("agreeing on whether to stop"):
            work.wait()
            said = int(flag.item())
        self.wanted = said % _KINDS
        return said // _KINDS
