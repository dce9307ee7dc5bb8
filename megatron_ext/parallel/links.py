"""How fast messages go between ranks: latency and bandwidth between neighbours, within a node and from node to node."""

from __future__ import annotations

import statistics
import time
from itertools import combinations
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.parallel.comm import annotate_errors

ROUNDS = 20
"""Small messages there and back, of which the fastest counts: the others waited for a processor, not for the link."""
REPEATS = 5
"""Large messages, of which the median counts."""
SMALLEST = 64 * 2**10
"""Bytes of the first message that is timed; the next is four times as large, until one takes `ENOUGH_S`."""
LARGEST = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""Bytes."""
TRIES = 3
"""How many are timed; the fastest counts, as one may have waited for a processor."""
ENOUGH_S = 0.02

Round = List[Tuple[int, int]]
"""Pairs of ranks that measure at the same time."""


def steps(nodes: Sequence[Sequence[int]], groups: Sequence[str] = ()) -> List[Round]:
    """Which ranks measure with which, one step after another. `nodes` are the ranks of each node, by node rank.

    First neighbours within each node. Then each node with the next one in the plan's order, the last with the first:
    their ranks all at once, as they share the nodes' link. No node is in two pairs of a step. Then the first nodes of
    every pair of node groups, or of one group, that none of these are; `groups` are by node rank.
    """
    within = [
        [(ranks[index], ranks[index + 1]) for ranks in nodes if index + 1 < len(ranks)]
        for index in range(max(map(len, nodes)) - 1)
    ]
    count = len(nodes)
    chain = [(node, node + 1) for node in range(count - 1)]
    rounds = [chain[0::2], chain[1::2], [(count - 1, 0)] if count > 2 else []]
    rounds += [[pair] for pair in _first_of_other_pairs(groups, [pair for pairs in rounds for pair in pairs])]
    between = [[pair for first, second in pairs for pair in zip(nodes[first], nodes[second])] for pairs in rounds]
    return [step for step in within + between if step]


def _first_of_other_pairs(groups: Sequence[str], known: Sequence[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Nodes of the pairs of groups that `known` pairs of nodes are not of."""
    seen = {frozenset((groups[first], groups[second])) for first, second in known} if groups else set()
    found = []
    for pair in combinations(range(len(groups)), 2):
        of_groups = frozenset(groups[node] for node in pair)
        if of_groups not in seen:
            seen.add(of_groups)
            found.append(pair)
    return found


def measure(every: Sequence[Round], device: torch.device) -> List[Dict[str, Any]]:
    """All ranks call it together. Returns what pairs measured whose first rank is this one (docs/formats.md)."""
    rank, found = dist.get_rank(), []
    for step in every:
        await_all(device)
        for first, second in step:
            if rank == first:
                found.append(_first(second, device))
            elif rank == second:
                _second(first, device)
    return found


def await_all(device: torch.device, group: Optional[dist.ProcessGroup] = None) -> None:
    """Returns when all ranks of a group, or all there are, are here.

    Not with torch's own barrier: as the first message of a group it takes, before torch 2.4, the GPU whose number is
    the rank's in the group.
    """
    with annotate_errors("waiting for the other ranks"):
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=group)
        one.item()


def _first(peer: int, device: torch.device) -> Dict[str, Any]:
    with annotate_errors(f"messages to rank {peer}"):
        latency = _latency_s(peer, device)
        there = _bandwidth(peer, latency, device)
    with annotate_errors(f"messages from rank {peer}"):
        _receive(peer, device)
        back = _number(device)
        dist.recv(back, peer)
    return {
        "to": peer,
        "latency_us": latency * 1e6,
        "gbit_per_s": there,
        "gbit_per_s_back": int(back.item()) / 1e6,
    }


def _second(peer: int, device: torch.device) -> None:
    with annotate_errors(f"messages from rank {peer}"):
        stamp = _number(device)
        for _ in range(ROUNDS):
            dist.recv(stamp, peer)
            dist.send(stamp, peer)
        latency = _number(device)
        dist.recv(latency, peer)
        _receive(peer, device)
    with annotate_errors(f"messages to rank {peer}"):
        back = _bandwidth(peer, int(latency.item()) / 1e9, device)
        dist.send(_number(device, int(back * 1e6)), peer)


def _latency_s(peer: int, device: torch.device) -> float:
    """Returns the latency of a small message one way: half of the way there and back."""
    stamp, times = _number(device), []
    for _ in range(ROUNDS):
        before = time.monotonic()
        dist.send(stamp, peer)
        dist.recv(stamp, peer)
        stamp.item()  # on a GPU the receive is only queued until then
        times.append(time.monotonic() - before)
    latency = min(times) / 2
    dist.send(_number(device, int(latency * 1e9)), peer)
    return latency


def _bandwidth(peer: int, latency_s: float, device: torch.device) -> float:
    """Gbit/s of large messages to a rank that is in `_receive`."""
    payload = torch.zeros(LARGEST[device.type], dtype=torch.uint8, device=device)
    size = SMALLEST
    while size < payload.numel() and min(_send_s(payload[:size], peer) for _ in range(TRIES)) < ENOUGH_S:
        size *= 4
    times = [_send_s(payload[:size], peer) for _ in range(REPEATS)]
    dist.send(_number(device, 0), peer)
    return size * 8 / max(statistics.median(times) - 2 * latency_s, 1e-9) / 1e9


def _send_s(payload: Tensor, peer: int) -> float:
    """Seconds until a message was received, and word of that is back."""
    answer = _number(payload.device)
    dist.send(_number(payload.device, payload.numel()), peer)
    before = time.monotonic()
    dist.send(payload, peer)
    dist.recv(answer, peer)
    answer.item()
    return time.monotonic() - before


def _receive(peer: int, device: torch.device) -> None:
    """Takes messages, each announced by its size, until a size of 0."""
    payload = torch.zeros(LARGEST[device.type], dtype=torch.uint8, device=device)
    size = _number(device)
    while True:
        dist.recv(size, peer)
        if not size.item():
            return
        dist.recv(payload[: int(size.item())], peer)
        dist.send(size, peer)


def _number(device: torch.device, value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=device)
