"""Islands: groups of replicas that train by themselves and meet every `train.sync_every` iterations."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_ext.contract.events import ISLANDS, WEIGHTS
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.parallel.comm import all_reduce, annotate_errors
from megatron_ext.parallel.groups import Groups
from megatron_ext.timeline.recorder import Recorder


class Islands:
    """This rank's island among the others. All ranks call its methods together."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, recorder: Recorder) -> None:
        assert plan.train.sync_every is not None
        self._every, self._last = plan.train.sync_every, plan.train.iterations
        every = plan.layout.island_replicas
        self.count = len(every)
        self.number = next(number for number, replicas in enumerate(every) if place.dp in replicas)
        own = every[self.number]
        taken = [sum(plan.micro_batches[replica] for replica in replicas) for replicas in every]
        self.part = taken[self.number] / sum(taken)
        """The part of the samples that this island takes."""
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
        shares, traffic = flat.tensor_split(self._shares), self._recorder.traffic
        with self._recorder.span("islands-all-reduce"):
            if self._own < self._shares and shares[self._own].numel():
                all_reduce(shares[self._own], self._groups.across, "averaging the islands' weights")
                traffic.all_reduced(shares[self._own], self._groups.across, ISLANDS)
            if len(self._members) == 1:
                return
            with annotate_errors("handing out the islands' weights"):
                for member, share in zip(self._members, shares):
                    if share.numel():
                        dist.broadcast(share, member, self._groups.data)
            if self._own < self._shares:
                traffic.all_gathered(shares[self._own], self._groups.data, WEIGHTS)
