"""How far each rank's clock is from rank 0's."""

from __future__ import annotations

import socket
import time
from typing import List, Tuple

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.timeline.recorder import Recorder

ROUNDS = 8


def align(recorder: Recorder, store: Store, name: str) -> None:
    """Writes a `clock` record on every rank; all ranks call it together, each time with another `name`.

    Ranks on one host share the monotonic clock. For any other host rank 0 answers a few round trips with its
    time; the shortest gives the offset, and half of it the uncertainty (Cristian 1989). They go through the store:
    between GPUs each rank would have to connect to rank 0, which takes time and GPU memory for each.
    """
    rank, store = dist.get_rank(), PrefixStore(f"clock/{name}", store)
    with annotate_errors("comparing clocks"):
        store.set(f"host/{rank}", socket.gethostname())
        if rank == 0:
            _answer(store, [store.get(f"host/{other}") for other in range(dist.get_world_size())])
        if store.get("host/0").decode() == socket.gethostname():
            now = time.monotonic_ns()
            recorder.clock(now, now, 0)
        else:
            recorder.clock(*_ask(store, rank))


def _answer(store: Store, hosts: List[bytes]) -> None:
    for remote in (rank for rank, host in enumerate(hosts) if host != hosts[0]):
        for number in range(ROUNDS):
            store.wait([f"ask/{remote}/{number}"])
            store.set(f"answer/{remote}/{number}", str(time.monotonic_ns()))


def _ask(store: Store, rank: int) -> Tuple[int, int, int]:
    """Own time, rank 0's time at that moment, uncertainty; nanoseconds."""
    trips = []
    for number in range(ROUNDS):
        before = time.monotonic_ns()
        store.set(f"ask/{rank}/{number}", "")
        store.wait([f"answer/{rank}/{number}"])
        after = time.monotonic_ns()
        trips.append((after - before, (before + after) // 2, int(store.get(f"answer/{rank}/{number}"))))
    trip, own, rank0 = min(trips)
    return own, rank0, (trip + 1) // 2
