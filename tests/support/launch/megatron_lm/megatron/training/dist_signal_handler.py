"""In place of Megatron-LM's: a signal that any rank has got is known to all."""

from __future__ import annotations

import signal
from typing import Any

import torch
import torch.distributed as dist


class DistributedSignalHandler:
    def __init__(self, sig: signal.Signals = signal.SIGTERM) -> None:
        self.sig = sig

    def signals_received(self) -> list[bool]:
        own = torch.tensor([int(self._signal_received)])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return [bool(own.item())]

    def __enter__(self) -> DistributedSignalHandler:
        self._signal_received = False

        def handler(_signum: int, _frame: Any) -> None:
            self._signal_received = True

        signal.signal(self.sig, handler)
        return self
