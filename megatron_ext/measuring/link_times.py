"""What messages and all-reduces take by their size, within nodes and between them."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.comm import annotate_errors, new_group
from megatron_ext.parallel.links import LARGEST, steps

SMALLEST = 1024
"""Bytes; each next size is four times as large."""
WARM_UP = 3
REPEATS = 25
"""How many small messages are timed, of which the fastest counts: the others waited for a processor, not for the
link."""
LARGE = 2**20
"""Bytes from which on messages are few, and their first quartile counts: what shares the link is a part of it."""
FEW = 7


def sizes(device: torch.device) -> List[int]:
    largest, size, found = LARGEST[device.type], SMALLEST, []
    while size <= largest:
        found.append(size)
        size *= 4
    return found


def p2p(nodes: Sequence[Sequence[int]], groups: Sequence[str], device: torch.device) -> List[Dict[str, Any]]:
    """One way between neighbours, half of a message there and back; between nodes of two groups, whose directions may
    differ, each way by itself. `nodes` are the ranks of each node, `groups` the nodes' groups.

    All ranks call it together. Pairs of a node and the next one measure at the same time, since they share its link.
    Returns what this rank measured, of a pair that has one time for both ways the first one: `to` and `us_by_bytes`.
    """
    rank, found = dist.get_rank(), []
    group_of = {rank: group for ranks, group in zip(nodes, groups) for rank in ranks}
    for step in steps(nodes, groups):
        _together(device, None)
        for first, second in step:
            if rank not in (first, second):
                continue
            peer = second if rank == first else first
            if group_of[first] != group_of[second]:
                times = [_one_way(peer, rank == sender, device) for sender in (first, second)]
                found.append({"to": peer, "us_by_bytes": times[0 if rank == first else 1]})
                continue
            there_and_back = _there_and_back(peer, rank == first, device)
            if rank == first:
                found.append({"to": second, "us_by_bytes": there_and_back})
    return found


def all_reduces(nodes: Sequence[Sequence[int]], device: torch.device) -> List[Dict[str, Any]]:
    """Times all ranks of a node, all nodes at once; then one rank of each node, all ranks of a node at once.

    All ranks call it together. Returns what this rank measured: `between`, `ranks` and `us_by_bytes`.
    """
    found = []
    across = [list(ranks) for ranks in zip(*nodes)]
    for between, groups in ((False, nodes), (True, across)):
        own: Optional[dist.ProcessGroup] = None
        size = 1
        for ranks in groups:
            if len(ranks) > 1:
                group = new_group(ranks)  # every rank takes part in making each group
                if dist.get_rank() in ranks:
                    own, size = group, len(ranks)
        _together(device, None)
        if own is not None:
            found.append({"between": between, "ranks": size, "us_by_bytes": _all_reduce(own, device)})
    return found


def _there_and_back(peer: int, first: bool, device: torch.device) -> Dict[str, float]:
    payload = torch.zeros(sizes(device)[-1], dtype=torch.uint8, device=device)
    with annotate_errors(f"messages to and from rank {peer}"):
        return {
            str(size): _round_trip(payload[:size], payload[:size], peer, first, device) / 2 * 1e6
            for size in sizes(device)
        }


def _one_way(peer: int, sends: bool, device: torch.device) -> Dict[str, float]:
    """Times each size as the sender sees it: until a single byte is back, less what that byte takes, at most half of
    any message there and that byte back."""
    payload = torch.zeros(sizes(device)[-1], dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    with annotate_errors(f"messages {'to' if sends else 'from'} rank {peer}"):
        trips = {size: _round_trip(payload[:size], answer, peer, sends, device) for size in sizes(device)}
        back = min(_round_trip(answer, answer, peer, sends, device), *trips.values()) / 2
        return {str(size): (trip - back) * 1e6 for size, trip in trips.items()}


def _round_trip(there: Tensor, back: Tensor, peer: int, first: bool, device: torch.device) -> float:
    """Seconds until a message of the first of two ranks has an answer; the second one's figure means nothing."""
    times = []
    for _ in range(WARM_UP + _repeats(there.numel())):
        before = time.perf_counter()
        if first:
            dist.send(there, peer)
            dist.recv(back, peer)
        else:
            dist.recv(there, peer)
            dist.send(back, peer)
        _finish(device)
        times.append(time.perf_counter() - before)
    return _counting(times[WARM_UP:], there.numel())


def _all_reduce(group: dist.ProcessGroup, device: torch.device) -> Dict[str, float]:
    payload = torch.zeros(sizes(device)[-1] // 4, device=device)
    found = {}
    with annotate_errors("all-reduces by size"):
        for size in sizes(device):
            times = []
            for _ in range(WARM_UP + _repeats(size)):
                _together(device, group)
                before = time.perf_counter()
                dist.all_reduce(payload[: size // 4], group=group)
                _finish(device)
                times.append(time.perf_counter() - before)
            found[str(size)] = _counting(times[WARM_UP:], size) * 1e6
    return found


def _counting(times: Sequence[float], size: int) -> float:
    return sorted(times)[len(times) // 4 if size >= LARGE else 0]


def _repeats(size: int) -> int:
    return FEW if size >= LARGE else REPEATS


def _together(device: torch.device, group: Optional[dist.ProcessGroup]) -> None:
    """Returns when all ranks of a group, or all there are, are here.

    Not with torch's own barrier: as the first message of a group it takes, before torch 2.4, the GPU whose number is
    the rank's in the group.
    """
    with annotate_errors("waiting for the other ranks"):
        dist.all_reduce(torch.ones(1, device=device), group=group)
        _finish(device)


def _finish(device: torch.device) -> None:
    """Waits for the GPU, where messages are only queued until then."""
    if device.type == "cuda":
        torch.cuda.synchronize()
