"""Where ranks stand: stage by stage, in a stage replica by replica, in a replica by place in the tensor group.

Where all stages are alike this is Megatron's order, tensor fastest, then data, then pipeline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple


class Summed(NamedTuple):
    """Ranks that add up a part of a tied parameter's gradient."""

    ranks: List[int]
    givers: List[int]
    """The ranks whose gradients it sums: one of each stage; the others have the same as one of these."""
    part: int
    """Which of the `parts` of the parameter's rows, counted from 0."""
    parts: int


@dataclass(frozen=True)
class Layout:
    """The ranks of a plan."""

    tensors: Tuple[int, ...]
    """Ranks of a tensor group, by stage."""
    replicas: Tuple[int, ...]
    """Replicas by stage."""
    islands: Tuple[int, ...] = ()
    """Replicas of each island, which sums gradients by itself; empty where all replicas sum them together."""
    parts: Tuple[Layout, ...] = ()
    """The ranks of each island, where islands have plans of their own; all else then is of the whole run."""
    start: int = 0
    """The number of the first replica, in such a part."""
    first: int = 0
    """Its first rank."""

    @classmethod
    def joined(cls, parts: Sequence[Layout]) -> Layout:
        """Islands of these layouts, one after another; tensor groups count as if all could be cut as finely."""
        counts, ranks = [part.replicas[0] for part in parts], [part.world_size for part in parts]
        placed = tuple(
            replace(part, start=sum(counts[:number]), first=sum(ranks[:number])) for number, part in enumerate(parts)
        )
        stages = max(part.stages for part in parts)
        tensor = lcm([one for part in parts for one in part.tensors])
        return cls((tensor,) * stages, (sum(counts),) * stages, tuple(counts), placed)

    @classmethod
    def grid(cls, tensor: int, data: int, pipeline: int) -> Layout:
        """All stages alike."""
        return cls((tensor,) * pipeline, (data,) * pipeline)

    @property
    def stages(self) -> int:
        return len(self.tensors)

    @property
    def even(self) -> bool:
        """Whether all stages have as many replicas, so that each replica is a pipeline of its own."""
        return len(set(self.replicas)) <= 1

    @cached_property
    def _firsts(self) -> List[int]:
        """The first rank of each stage, and after the last one."""
        return list(accumulate((t * r for t, r in zip(self.tensors, self.replicas)), initial=self.first))

    @property
    def world_size(self) -> int:
        return sum(part.world_size for part in self.parts) if self.parts else self._firsts[-1] - self.first

    def rank(self, stage: int, dp: int, tp: int) -> int:
        """The rank of a place."""
        if self.parts:
            return self.part_of(dp).rank(stage, dp, tp)
        return self._firsts[stage] + (dp - self.start) * self.tensors[stage] + tp

    def part_of(self, dp: int) -> Layout:
        """The one of the `parts` that has this replica."""
        return next(part for part in reversed(self.parts) if dp >= part.start)

    def dps(self, stage: int) -> range:
        """The numbers of a stage's replicas."""
        return range(self.start, self.start + self.replicas[stage])

    def stage_dp_tp(self, rank: int) -> Tuple[int, int, int]:
        """Stage, replica and place in the tensor group of a rank."""
        return self._places[rank - self.first]

    @cached_property
    def _places(self) -> List[Tuple[int, int, int]]:
        if self.parts:
            return [place for part in self.parts for place in part._places]
        return [
            (stage, dp, tp)
            for stage, (tensor, replicas) in enumerate(zip(self.tensors, self.replicas))
            for dp in range(self.start, self.start + replicas)
            for tp in range(tensor)
        ]

    def data_groups(self) -> List[List[int]]:
        """Ranks with the same weights: they all-reduce gradients, in each island by itself."""
        if self.parts:
            return [group for part in self.parts for group in part.data_groups()]
        if not self.islands:
            return self.replica_groups()
        return [group[island.start : island.stop] for group in self.replica_groups() for island in self.island_replicas]

    @cached_property
    def island_replicas(self) -> List[range]:
        """The replicas of each island, which follow each other."""
        return ranges_of_sizes(self.islands)

    def across_islands(self) -> List[List[int]]:
        """Ranks that average a share of the weights: one of each island; the smallest island has as many replicas as
        there are shares."""
        return [
            [group[island[number]] for island in self.island_replicas]
            for group in self.replica_groups()
            for number in range(min(self.islands, default=0))
        ]

    def replica_groups(self) -> List[List[int]]:
        """Ranks with the same part of the model, in all islands."""
        return [
            [self.rank(stage, dp, tp) for dp in self.dps(stage)]
            for stage in range(self.stages)
            for tp in range(self.tensors[stage])
        ]

    def tensor_groups(self) -> List[List[int]]:
        """Ranks that share layers."""
        return [list(self._group(stage, dp)) for stage in range(self.stages) for dp in self.dps(stage)]

    def model_groups(self, sharded: bool = False) -> List[List[int]]:
        """Ranks that together have the gradients of the whole model: of each replica, or all ranks where stages have
        unlike numbers or replicas share the optimizer."""
        if sharded or not self.even:
            return [list(range(self.world_size))]
        return [[rank for stage in range(self.stages) for rank in self._group(stage, dp)] for dp in self.dps(0)]

    def channel_groups(self, stages: Sequence[int]) -> List[List[int]]:
        """Ranks of these stages that hand activations to each other."""
        if not self.even:
            return [[rank for stage in stages for dp in range(self.replicas[stage]) for rank in self._group(stage, dp)]]
        if len(set(self.tensors)) > 1:
            return [[rank for stage in stages for rank in self._group(stage, dp)] for dp in self.dps(0)]
        return [[self.rank(stage, dp, tp) for stage in stages] for dp in self.dps(0) for tp in range(self.tensors[0])]

    def _group(self, stage: int, dp: int) -> range:
        """The ranks of a tensor group."""
        first = self.rank(stage, dp, 0)
        return range(first, first + self.tensors[stage])

    def met(self, stage: int, dp: int, other: int) -> List[int]:
        """The replicas of stage `other` with which replica `dp` of `stage` has micro-batches in common.

        Micro-batch m, counted over the iteration, is taken by replica m mod r of a stage of r, where stages differ.
        """
        if self.even:
            return [dp]
        step = math.gcd(self.replicas[stage], self.replicas[other])
        return list(range(dp % step, self.replicas[other], step))

    def tied_groups(self, stages: Sequence[int], sharded: bool) -> List[Summed]:
        """Which ranks of `stages`, each of which has a copy of a parameter, add up its gradient.

        A parameter that tensor groups share by rows is added up part by part, as it lies on both: groups of 2 and of
        4 have 4 parts. Of one that all of a group have, each rank adds its own, as far as all groups have as many.
        """
        tensors = [self.tensors[stage] for stage in stages]
        parts = lcm(tensors) if sharded else 1
        columns = parts if sharded else min(tensors)
        rows = min(self.replicas[stage] for stage in stages)
        groups = []
        for dp in range(rows):
            for column in range(columns):
                ranks, givers = [], []
                for stage, tensor in zip(stages, tensors):
                    own = [column * tensor // parts] if sharded else list(range(column, tensor, columns))
                    givers.append(self.rank(stage, self.start + dp, own[0]))
                    for replica in self.dps(stage)[dp::rows]:
                        ranks += [self.rank(stage, replica, tp) for tp in own]
                groups.append(Summed(ranks, givers, column if sharded else 0, parts))
        return groups


def ranges_of_sizes(sizes: Sequence[int]) -> List[range]:
    """Ranges of these sizes, one after another from 0 on."""
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes)]


def lcm(numbers: Sequence[int]) -> int:
    """The least number that all of these divide."""
    found = 1
    for number in numbers:
        found = found * number // math.gcd(found, number)
    return found


class PlacedPlan:
    """What follows from the layout of a plan, in whichever form the plan is."""

    pipeline: int
    chunks: int

    @property
    def layout(self) -> Layout:
        """Where ranks stand."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def alike(self) -> bool:
        """Whether all stages have tensor groups of one size, and as many replicas."""
        return self.layout.even and len(set(self.layout.tensors)) == 1 and not self.layout.parts

    @cached_property
    def tensor_size(self) -> int:
        """Ranks of a tensor group; where stages differ, of the largest."""
        return max(self.layout.tensors)

    @property
    def virtual_stages(self) -> int:
        """Parts of the model: chunk c of stage s is number c * pipeline + s."""
        return self.pipeline * self.chunks


def megatron_layout(partition: Iterable[int], pipeline: int) -> Optional[str]:
    """Layers per (virtual) stage in Megatron's words: E embedding, t layer, L head and loss; None for one stage.

    Source: docs/user-guide/features/pipeline_parallel_layout.md of Megatron-LM; a stage may be empty. With several
    chunks both sides count the stages of chunk 0 first.
    """
    if pipeline == 1:
        return None
    stages = [f"t*{layers}" if layers else "" for layers in partition]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def stage_name(number: int, island: Optional[int]) -> str:
    """What a stage is called: its number, and that of the island whose own plan it is of."""
    return str(number) if island is None else f"{number} of island {island}"
