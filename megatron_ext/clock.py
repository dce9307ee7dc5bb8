"""How far each rank's clock is from rank 0's."""

from __future__ import annotations

import socket
import time
from typing import List

import torch
import torch.distributed as dist

from megatron_ext.comm import told
from megatron_ext.timeline import Recorder

ROUNDS = 8


def align(recorder: Recorder, device: torch.device) -> None:
    """Writes a `clock` record on every rank; all ranks call it together.

    Ranks on one host share the monotonic clock. For any other host rank 0 answers a few round trips with its
    time; the shortest gives the offset, and half of it the uncertainty (Cristian 1989).
    """
    hosts: List[str] = [""] * dist.get_world_size()
    with told("comparing clocks"):
        dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    if hosts[rank] == hosts[0]:
        now = time.monotonic_ns()
        recorder.clock(now, now, 0)
    for remote in (r for r, host in enumerate(hosts) if host != hosts[0]):
        if rank == 0:
            _answer(remote, device)
        elif rank == remote:
            recorder.clock(*_ask(device))


def _answer(remote: int, device: torch.device) -> None:
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    with told(f"comparing clocks with rank {remote}"):
        for _ in range(ROUNDS):
            dist.recv(stamp, remote)
            stamp.item()  # on a GPU the receive is only queued until then
            stamp.fill_(time.monotonic_ns())
            dist.send(stamp, remote)


def _ask(device: torch.device) -> List[int]:
    """[own time, rank 0's time at that moment, uncertainty], nanoseconds."""
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    best = None
    with told("comparing clocks with rank 0"):
        for _ in range(ROUNDS):
            before = time.monotonic_ns()
            dist.send(stamp, 0)
            dist.recv(stamp, 0)
            stamp.item()
            after = time.monotonic_ns()
            if best is None or (after - before + 1) // 2 < best[2]:
                best = [(before + after) // 2, int(stamp.item()), (after - before + 1) // 2]
    assert best is not None
    return best
