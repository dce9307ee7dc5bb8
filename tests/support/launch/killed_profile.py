"""python -m tests.support.launch.killed_profile PLAN NODE_RANK: `megatron_ext.profile`, of which ranks are killed.

KILLED_AT names what of a rank is killed, and from which samples on: `room:16,streams:4,point:8`. Linux does so to a
process that takes too much memory.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch.distributed as dist

from megatron_ext import profile, worker
from megatron_ext.contract.files import GrowingNote
from megatron_ext.measuring.room import Room
from megatron_ext.measuring.steps import Copies

AT = {what: int(samples) for what, samples in (one.split(":") for one in os.environ["KILLED_AT"].split(","))}


def _killing(method: Any, what: str, samples: Any) -> Any:
    def instead(self: Any, *args: Any) -> Any:
        if samples(*args) >= AT.get(what, 1 << 30):
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args)

    return instead


Room.fits = _killing(Room.fits, "room", lambda batch: batch)  # type: ignore[method-assign]
Copies.measured = _killing(  # type: ignore[method-assign]
    Copies.measured, "streams", lambda batch, counts, _: batch * max(counts)
)
profile._Measurements._passes = _killing(  # type: ignore[method-assign]
    profile._Measurements._passes, "point", lambda model, group, batch: batch
)
if "links" in AT:
    original = GrowingNote.update

    def update(self: GrowingNote, **values: Any) -> None:
        original(self, **values)
        if values.get("doing") == "links":
            dist.barrier()  # what a rank that is slower has measured is written, too
            os.kill(os.getpid(), signal.SIGKILL)

    GrowingNote.update = update  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], profile.measure))
