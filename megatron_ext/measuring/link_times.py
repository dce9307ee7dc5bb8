"""What messages and all-reduces take by their size, within nodes and between them."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.comm import all_gather, annotate_errors, new_group
from megatron_ext.parallel.links import LARGEST, await_all, steps
from megatron_ext.parallel.summing import begin_reduce_scatter

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
        await_all(device)
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
        own = _own_group([ranks for ranks in groups if len(ranks) > 1], device)
        if own is not None:
            times = _collective("all_reduce", *own, device)
            found.append({"between": between, "ranks": len(own[1]), "us_by_bytes": times})
    return found


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "alltoall")


def collectives(nodes: Sequence[Sequence[int]], device: torch.device) -> List[Dict[str, Any]]:
    """Times every collective for numbers of ranks: of the first 2, 4, ... and all ranks of a node, all nodes at once,
    and of one rank of each of the first 2, 4, ... and all nodes, all ranks of these nodes at once.

    All ranks call it together. Returns what this rank measured as the first one of its group: `operation`, `ranks`,
    `nodes`, `sharing` and `us_by_bytes`, in microseconds.
    """
    found = []
    across = [list(ranks) for ranks in zip(*nodes)]
    for between, groups in ((False, [list(ranks) for ranks in nodes]), (True, across)):
        most = max(map(len, groups))
        for count in sorted({*(1 << power for power in range(1, most.bit_length())), most} - {1}):
            some = [ranks[:count] for ranks in groups if len(ranks) >= count]
            own = _own_group(some, device)
            for operation in OPERATIONS if own is not None else ():
                assert own is not None
                times = _collective(operation, *own, device)
                if dist.get_rank() == own[1][0]:
                    place = {"nodes": count, "sharing": len(some)} if between else {"nodes": 1, "sharing": 1}
                    found.append({"operation": operation, "ranks": count, "us_by_bytes": times, **place})
    return found


def _own_group(
    groups: Sequence[Sequence[int]], device: torch.device
) -> Optional[Tuple[dist.ProcessGroup, Sequence[int]]]:
    """The group of these that this rank is in, with its ranks; returns when all ranks are here."""
    own = None
    for ranks in groups:
        group = new_group(ranks)  # every rank takes part in making each group
        if dist.get_rank() in ranks:
            own = group, ranks
    await_all(device)
    return own


def _collective(
    operation: str, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device
) -> Dict[str, float]:
    """Times one by bytes, as nccl-tests counts them: the whole tensor, what a rank sends to all, or a message."""
    count, largest = len(ranks), sizes(device)[-1] // 4
    payload, other = (torch.zeros(largest, device=device) for _ in range(2))
    place = list(ranks).index(dist.get_rank())
    following, before = ranks[(place + 1) % count], ranks[place - 1]

    def once(numbers: int) -> None:
        part = numbers // count
        if operation == "all_reduce":
            dist.all_reduce(payload[:numbers], group=group)
        elif operation == "all_gather":
            all_gather(other[:part], payload[: part * count].view(count, part), group, "all-gathers by size")
        elif operation == "reduce_scatter":
            begin_reduce_scatter(payload[: part * count], other[:part], group, payload.dtype).wait()
        elif operation == "alltoall":
            dist.all_to_all_single(other[: part * count], payload[: part * count], group=group)
        else:
            ops = [
                dist.P2POp(dist.isend, payload[:numbers], following, group),
                dist.P2POp(dist.irecv, other[:numbers], before, group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        _finish(device)

    found = {}
    with annotate_errors(f"{operation} by size"):
        for size in sizes(device):
            times = []
            for _ in range(WARM_UP + _repeats(size)):
                await_all(device, group)
                begun = time.perf_counter()
                once(size // 4)
                times.append(time.perf_counter() - begun)
            found[str(size)] = _counting(times[WARM_UP:], size) * 1e6
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


def _counting(times: Sequence[float], size: int) -> float:
    return sorted(times)[len(times) // 4 if size >= LARGE else 0]


def _repeats(size: int) -> int:
    return FEW if size >= LARGE else REPEATS


def _finish(device: torch.device) -> None:
    """Waits for the GPU, where messages are only queued until then."""
    if device.type == "cuda":
        torch.cuda.synchronize()
