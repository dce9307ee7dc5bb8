"""With whom a rank exchanges activations and gradients, and how all ranks connect without waiting for each other."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.schedule.replay import AnyAction
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.parallel.comm import Peer, all_reduce, told
from megatron_ext.parallel.groups import Groups

Channels = Dict[Kind, List[List[Peer]]]
"""By kind of message, to or from whom that of micro-batch m goes: those at m modulo the length of the list. A receive
has one peer; a kind that a rank never exchanges is missing."""
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


def channels(layout: Layout, place: Place, chunks: int, groups: Groups) -> Channels:
    """A rank's. With several chunks the last stage is followed by the first.

    Between tensor groups of unlike sizes rank j of the receiving one takes what rank j mod t of the sending one, of t
    ranks, has: all of a group have the same.
    """
    stage, last = place.stage, layout.stages - 1
    before, after = (stage - 1) % layout.stages, (stage + 1) % layout.stages
    sides: List[Tuple[Kind, int, Optional[dist.ProcessGroup]]] = []
    if stage > 0 or chunks > 1:
        sides.append((Kind.RECV_FORWARD, before, groups.forward if stage > 0 else groups.forward_wrap))
        sides.append((Kind.SEND_BACKWARD, before, groups.backward if stage > 0 else groups.backward_wrap))
    if stage < last or chunks > 1:
        sides.append((Kind.SEND_FORWARD, after, groups.forward if stage < last else groups.forward_wrap))
        sides.append((Kind.RECV_BACKWARD, after, groups.backward if stage < last else groups.backward_wrap))
    found: Channels = {}
    for kind, other, group in sides:
        own, theirs = layout.tensors[stage], layout.tensors[other]
        ends = [place.tp % theirs] if kind in RECEIVES else [tp for tp in range(theirs) if tp % own == place.tp]
        met = layout.met(stage, place.dp, other)
        found[kind] = [
            [Peer(layout.rank(other, replica, tp), group) for tp in ends if replica in met]
            for replica in (met if layout.even else range(layout.replicas[other]))
        ]
    return found


def by_way(actions: Sequence[AnyAction], kind: Kind, ways: int) -> List[List[AnyAction]]:
    """The actions of a kind for each of so many ways that its messages go, as in `Channels`."""
    found: List[List[AnyAction]] = [[] for _ in range(ways)]
    for action in actions:
        if action.kind is kind:
            found[action.micro_batch % ways].append(action)
    return found


def warm_up(groups: Groups, peers: Channels, place: Place, stages: int, device: torch.device) -> None:
    """One message through every group and channel, in an order in which no rank waits for one that waits for it.

    All ranks call it. nccl connects ranks at their first message; they wait there for each other, with calls that may
    also wait for whatever the GPU is doing: with receives posted ahead of time, for ever. First come the groups
    of each kind, in one order for all ranks. Then the channels, in one order as well: between the stages 0 and 1, 2 and
    3 and so on, then 1 and 2, 3 and 4, for most of them at once; the way from the last stage to the first comes last.
    """
    message = torch.zeros(1, device=device)
    with told("connecting to all ranks"):
        dist.all_reduce(message)
    for what in ("tensor", "data", "model"):
        all_reduce(message, getattr(groups, what), f"connecting the {what} group")
    for parts in groups.tied:
        for part in parts:
            all_reduce(message, part.group, "connecting the ranks that share a parameter")
    before = (Kind.RECV_FORWARD, Kind.SEND_BACKWARD)
    forward = (Kind.RECV_FORWARD, Kind.SEND_FORWARD)

    def turn(channel: Tuple[Kind, Peer]) -> Tuple[bool, int, bool, Tuple[int, int]]:
        kind, peer = channel
        wraps = place.stage == (0 if kind in before else stages - 1)
        ends = (peer.rank, place.rank) if kind in RECEIVES else (place.rank, peer.rank)
        return wraps, (place.stage - 1 if kind in before else place.stage) % 2, kind not in forward, ends

    every = [(kind, peer) for kind, ways in peers.items() for way in ways for peer in way]
    for kind, peer in sorted(every, key=turn):
        exchange = dist.recv if kind in RECEIVES else dist.send
        with told(f"connecting to rank {peer.rank}"):
            exchange(message, peer.rank, group=peer.group)
    message.cpu()
