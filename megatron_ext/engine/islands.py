"""Islands: groups of replicas that train by themselves and meet every `train.sync_every` iterations."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.events import ISLANDS, WEIGHTS
from megatron_ext.contract.layout import lcm, ranges_of_sizes
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.comm import all_reduce, annotate_errors
from megatron_ext.parallel.groups import Groups, Meeting
from megatron_ext.tasks.cut import cut
from megatron_ext.tasks.task import Task
from megatron_ext.timeline.recorder import Recorder


def stages_of_islands(plan: Plan, task: Task) -> Dict[str, Tuple[int, ...]]:
    """For each block, the stage of each island that holds it, where islands have plans of their own."""
    held = [
        {block.name: number for number, part in enumerate(cut(task, own.partition)) for block in part.blocks}
        for own in plan.island_plans or ()
    ]
    return {block.name: tuple(stage_of[block.name] for stage_of in held) for block in task.blocks}


class Islands:
    """This rank's island among the others. All ranks call its methods together."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, recorder: Recorder) -> None:
        assert plan.train.sync_every is not None
        self._every, self._last = plan.train.sync_every, plan.train.iterations
        every = ranges_of_sizes(plan.islands or ())
        self.count = len(every)
        self.number = next(number for number, replicas in enumerate(every) if place.dp in replicas)
        own = every[self.number]
        taken = [sum(plan.micro_batches[replica] for replica in replicas) for replicas in every]
        self.part = taken[self.number] / sum(taken)
        """The part of the samples that this island takes."""
        self.weight = 0.0 if plan.part is not None and place.tp else self.part
        """What this rank counts in sums over `groups.replicas`, where these are all ranks of tensor groups."""
        self.leads = place.dp == own.start
        """Whether this rank's replica is the island's first."""
        self._members = [plan.layout.rank(place.stage, replica, place.tp) for replica in own]
        self._own = place.dp - own.start
        self._shares = min(map(len, every))
        self._groups = groups
        self._recorder = recorder

    def meet_after(self, iteration: int) -> bool:
        """Whether islands meet after an iteration: every `sync_every`, and after the last one."""
        return iteration % self._every == 0 or iteration == self._last

    def sum(self, flat: Tensor) -> None:
        """Sums over the islands, in place. As many replicas of each as the smallest has sum a share, which then goes
        to the others of their island, so that an island sends its weights once."""
        with self._recorder.span("islands-all-reduce"):
            shares = flat.tensor_split(self._shares)
            if self._own < self._shares:
                self._sum(shares[self._own], self._groups.across)
            self._hand_out(shares)

    def sum_parts(self, flat: Tensor, parts: Parts) -> None:
        """The same where islands have plans of their own, whose ranks have other parts of the weights."""
        with self._recorder.span("islands-all-reduce"):
            found = {meeting: parts.of(flat, meeting) for meeting in parts.meetings}
            for meeting, part in found.items():
                shares = part.tensor_split(self._shares)
                if self._own < self._shares:
                    self._sum(shares[self._own], self._groups.meetings[meeting])
                self._hand_out(shares)
            parts.put(flat, found)

    def _sum(self, share: Tensor, group: Optional[dist.ProcessGroup]) -> None:
        if share.numel():
            all_reduce(share, group, "averaging the islands' weights")
            self._recorder.traffic.all_reduced(share, group, ISLANDS)

    def _hand_out(self, shares: Sequence[Tensor]) -> None:
        """Gives the replicas of this island each other's shares."""
        if len(self._members) == 1:
            return
        with annotate_errors("handing out the islands' weights"):
            for member, share in zip(self._members, shares):
                if share.numel():
                    dist.broadcast(share, member, self._groups.data)
        if self._own < self._shares:
            self._recorder.traffic.all_gathered(shares[self._own], self._groups.data, WEIGHTS)


class Parts:
    """What a rank's weights consist of, as far as other islands have them together, too.

    Matrices that tensor groups share are cut as finely as the groups of all islands together: groups of 2 and of 4
    have 4 parts. What all ranks of a group have goes with each of these parts.
    """

    def __init__(
        self, plan: Plan, place: Place, task: Task, flat: FlatWeights, places: Mapping[str, Tuple[str, str]]
    ) -> None:
        """`plan` is that of the run, `place` this rank's; `places` has the block of each parameter."""
        self._task, self._flat = task, flat
        stages = stages_of_islands(plan, task)
        layouts = plan.layout.parts
        self._names: Dict[Tuple[int, ...], List[str]] = {}
        for name in sorted(flat.slices):
            block, inner = places[name]
            if name == f"{block}.{inner}":  # not a copy of another stage's parameter
                self._names.setdefault(stages[block], []).append(name)
        own = layouts.index(plan.layout.part_of(place.dp))
        self._cuts: Dict[Tuple[int, ...], Tuple[int, int]] = {}
        """How many parts each of this rank's matrices has, and the number of the first."""
        for held in self._names:
            sizes = [part.tensors[stage] for part, stage in zip(layouts, held)]
            count = lcm(sizes) // sizes[own]
            self._cuts[held] = count, place.tp * count
        self.meetings = [
            Meeting(held, first + number) for held, (count, first) in self._cuts.items() for number in range(count)
        ]
        self.meetings.sort()

    def of(self, flat: Tensor, meeting: Meeting) -> Tensor:
        """A copy of what the ranks of a meeting have together, in the same order on all."""
        count, first = self._cuts[meeting.stages]
        found = []
        for name in self._names[meeting.stages]:
            value, shard = self._flat.view(name, flat), self._task.shard(name)
            found.append(value if shard is None else shard.part(value, count, meeting.part - first))
        return torch.cat([one.flatten() for one in found])

    def put(self, flat: Tensor, found: Mapping[Meeting, Tensor]) -> None:
        """The inverse of `of`, for all meetings of this rank."""
        for stages, (count, first) in self._cuts.items():
            at = 0
            for name in self._names[stages]:
                value, shard = self._flat.view(name, flat), self._task.shard(name)
                numel = value.numel() // (1 if shard is None else count)
                parts = [found[Meeting(stages, first + number)][at : at + numel] for number in range(count)]
                at += numel
                if shard is None:
                    value.copy_(parts[0].view_as(value))
                else:
                    shape = list(value.shape)
                    shape[shard.dim] //= count
                    value.copy_(shard.whole([part.view(shape) for part in parts]))
