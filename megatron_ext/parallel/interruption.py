"""Being asked to save and end: SIGUSR2, by which Slurm announces a time limit or a preemption.

The signal reaches the ranks at different moments, or only some of them. All end after the same iteration, because
each tells the others at every iteration whether it was asked.
"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import FrameType
from typing import ContextManager, Optional

import torch
import torch.distributed as dist

from megatron_ext.parallel.comm import told

SIGNAL = signal.SIGUSR2
ASKED, SPENT = 1, 2
"""Why all ranks end: one of them was asked to; the run has cost what it may."""

_asked = False


class Interrupted(Exception):
    """Training ended early, on request; its checkpoint is on disk."""


def listen() -> None:
    """From now on the signal is remembered instead of ending this process."""
    signal.signal(SIGNAL, _note)


def _note(_signum: int, _frame: Optional[FrameType]) -> None:
    global _asked
    _asked = True


class Interruption:
    """What the ranks tell each other. The message of one iteration is read after the next, so nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._work: Optional[dist.Work] = None
        self._aside: ContextManager[object] = nullcontext()
        """There a GPU reads the message without waiting for what it trains."""
        if device.type == "cuda":
            self._aside = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def agreed(self, own: int = 0) -> int:
        """Called by all ranks after each iteration: why they end, as one of them had it by the iteration before; 0 if
        they go on. `own` is this rank's reason, beside that it was asked to.

        Raises:
            PeerLost: another rank is gone.
        """
        before = self.finish()
        self._flag.fill_(max(own, ASKED if _asked else 0))
        with told("telling whether to end"):
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return before

    def finish(self) -> int:
        """Waits for the last message; what it said."""
        if self._work is None:
            return 0
        with self._aside, told("telling whether to end"):
            self._work.wait()
            why = int(self._flag.item())
        self._work = None
        return why
