"""Where the ranks of a run on one node meet: a file in memory that they all inherit.

It needs no port and no names. TCPStore asks the name server for the name of every address that connects, 127.0.0.1
as an IPv6 address too, which no hosts file has; where an answer is slow or lost, a rank comes seconds late.
"""

from __future__ import annotations

import os

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from megatron_ext.contract.plan import Plan


def suffices(plan: Plan) -> bool:
    """Whether all ranks are on one node, and no port was asked for. nccl keeps the store that its watchdog knows."""
    return len(plan.used) == 1 and plan.master_port is None and plan.device == "cpu"


class LocalStore:
    """Made before the ranks are forked; gone with the last process that has it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("tdpp-store")

    def join(self) -> Store:
        """The store, in a rank."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return FileStore(f"/proc/self/fd/{self._file}")
