"""The process groups of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch.distributed as dist

from megatron_ext.contract.layout import Layout, lcm
from megatron_ext.parallel.comm import new_group


class Tied(NamedTuple):
    """A parameter of which several stages have a copy."""

    stages: Sequence[int]
    sharded: bool
    """Whether the ranks of a tensor group share it, by rows."""


class TiedPart(NamedTuple):
    """A part of a tied parameter that this rank has, and with whom it adds up its gradient."""

    group: dist.ProcessGroup
    part: int
    parts: int
    """How many parts the parameter's rows here are cut into, of which it is this one."""
    gives: bool
    """Whether this rank's gradient is one of those that are added up."""


class ByNode(NamedTuple):
    """A group whose ranks lie on several nodes, as many on each."""

    within: dist.ProcessGroup
    """Those on this rank's node."""
    across: dist.ProcessGroup
    """One on each node: those with this rank's number there."""

    @property
    def number(self) -> int:
        """This rank's, such that those of a share of `within` follow each other."""
        return dist.get_rank(self.within) * dist.get_world_size(self.across) + dist.get_rank(self.across)


class Meeting(NamedTuple):
    """What a rank of each island averages, where these have plans of their own."""

    stages: Tuple[int, ...]
    """The stage of each island that holds the blocks."""
    part: int
    """Which part of the matrices that tensor groups share, cut as finely as all islands' groups together."""


@dataclass(frozen=True)
class Groups:
    """This rank's process groups; None where it is alone or not a member."""

    tensor: Optional[dist.ProcessGroup] = None
    data: Optional[dist.ProcessGroup] = None
    """Those that sum gradients: all replicas, or those of an island."""
    replicas: Optional[dist.ProcessGroup] = None
    """All replicas, of all islands."""
    across: Optional[dist.ProcessGroup] = None
    """A rank of each island, which average a share of their weights."""
    meetings: Mapping[Meeting, dist.ProcessGroup] = field(default_factory=dict)
    """The same where islands have plans of their own, by what the ranks have in common."""
    by_node: Optional[ByNode] = None
    """The data group's parts, where gradients are summed within nodes first."""
    model: Optional[dist.ProcessGroup] = None
    forward: Optional[dist.ProcessGroup] = None
    """Activations, from a stage to the next one."""
    backward: Optional[dist.ProcessGroup] = None
    """Gradients, from a stage to the one before."""
    forward_wrap: Optional[dist.ProcessGroup] = None
    """Activations, from the last stage to the first one's next chunk: with two stages, the way of the gradients."""
    backward_wrap: Optional[dist.ProcessGroup] = None
    """Gradients, from the first stage to the last one's previous chunk."""
    tied: Sequence[Sequence[TiedPart]] = ()
    """For each parameter of which several stages have a copy, in the order of `ties`; none where this rank has no
    copy."""

    @classmethod
    def make(
        cls,
        layout: Layout,
        chunks: int,
        ties: Sequence[Tied],
        timeout: timedelta,
        sharded: bool = False,
        by_node: Sequence[Sequence[Sequence[int]]] = (),
    ) -> Groups:
        """Makes all groups of the layout; every rank must call it, for each group needs all ranks' consent. `sharded`
        is whether replicas share the optimizer; `by_node` are data groups whose gradients are summed within nodes
        first, by node (`megatron_ext.contract.plan.Plan.by_node`)."""
        rank = dist.get_rank()

        def mine(rank_lists: Iterable[Sequence[int]]) -> Optional[dist.ProcessGroup]:
            own = None
            for ranks in rank_lists:
                if len(ranks) > 1:
                    group = new_group(ranks, timeout)
                    if rank in ranks:
                        own = group
            return own

        def parts(tie: Tied) -> Sequence[TiedPart]:
            found = []
            for ranks, givers, part, of in layout.tied_groups(tie.stages, tie.sharded):
                group = mine([ranks])
                if group is not None:
                    stage, _, tp = layout.stage_dp_tp(rank)
                    own = of // layout.tensors[stage] if tie.sharded else 1
                    first = tp * own if tie.sharded else 0
                    found.append(TiedPart(group, part - first, own, rank in givers))
            return found

        data = mine(layout.data_groups())
        within = mine(ranks for group in by_node for ranks in group)
        across = mine(ranks for group in by_node for ranks in zip(*group))
        every = range(layout.stages)
        ends = layout.channel_groups((0, layout.stages - 1)) if chunks > 1 else []
        return cls(
            tensor=mine(layout.tensor_groups()),
            data=data,
            replicas=mine(layout.replica_groups()) if layout.islands else data,
            across=mine(layout.across_islands()),
            by_node=None if within is None or across is None else ByNode(within, across),
            model=mine(layout.model_groups(sharded)),
            tied=[parts(tie) for tie in ties],
            forward=mine(layout.channel_groups(every)),
            backward=mine(layout.channel_groups(every)),
            forward_wrap=mine(ends),
            backward_wrap=mine(ends),
        )


def of_islands(
    layout: Layout, ties: Sequence[Sequence[Tied]], held: Iterable[Tuple[int, ...]], timeout: timedelta
) -> Groups:
    """Makes all groups of islands with plans of their own; every rank must call it. `ties` are those of each island,
    `held` says for every block which stage of each island holds it."""
    rank, own = dist.get_rank(), Groups()
    for part, tied in zip(layout.parts, ties):
        made = Groups.make(part, 1, tied, timeout)
        if part.first <= rank < part.first + part.world_size:
            own = made
    last = [group for part in layout.parts for group in part.tensor_groups()[-part.replicas[0] :]]
    lasts = [rank for group in last for rank in group]
    together = new_group(lasts, timeout)
    meetings: Dict[Meeting, dist.ProcessGroup] = {}
    for stages in dict.fromkeys(held):
        tensors = [part.tensors[stage] for part, stage in zip(layout.parts, stages)]
        parts = lcm(tensors)
        for number in range(parts):
            for replica in range(min(layout.islands)):
                ranks = [
                    part.rank(stage, part.start + replica, number * tensor // parts)
                    for part, stage, tensor in zip(layout.parts, stages, tensors)
                ]
                group = new_group(ranks, timeout)
                if rank in ranks:
                    meetings[Meeting(stages, number)] = group
    return replace(own, replicas=together if rank in lasts else None, meetings=meetings)
