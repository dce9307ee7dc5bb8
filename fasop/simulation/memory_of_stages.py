"""What the ranks of each stage of a plan keep in memory, and in which proportion its replicas share it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from fasop.costs.hardware import NodeKind
from fasop.costs.memory.allowance import room_gib, with_allowance
from fasop.costs.memory.amounts import GIB, Amount, StageMemory
from fasop.costs.memory.shared_state import proportions
from fasop.costs.memory.stages import stage_memory
from fasop.costs.parallelism import Parallelism
from fasop.costs.schedules import chunks_in_flight
from fasop.costs.training import PlacedTraining, Training
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, in_flight
from megatron_ext.contract.schedule.stream_check import prove


@dataclass(frozen=True, kw_only=True)
class HeldOnKind:
    """What the ranks of a stage hold on nodes of one kind."""

    kind: NodeKind
    proportion: int
    """The weight of its replicas in what those of the stage share out; 1 where all keep as much."""
    memory: StageMemory[float]
    layers: int

    @property
    def gib(self) -> float:
        return self.memory.of(self.layers) / GIB

    @property
    def left_gib(self) -> float:
        """Return what is left of its GPU."""
        return self.kind.gpu.memory_gib - self.gib


def held_on_kinds(plan: PlacedTraining, trainings: Sequence[Training]) -> list[list[HeldOnKind]]:
    """Work out, for each stage, what its ranks hold on each kind of node, the fullest first; `trainings` have the
    stages' sizes."""
    return [_Stage(plan, stage, training).held for stage, training in enumerate(trainings)]


def shards_of(plan: PlacedTraining) -> list[list[int]] | None:
    """Return, for each stage, in which proportion its replicas keep what they share out; None where those of every
    stage keep as much."""
    parallel = plan.training.parallel
    trainings = [plan.training] * parallel.pipeline if parallel.alike else HeterogeneousStages(plan).trainings
    found = [_Stage(plan, stage, training).proportions for stage, training in enumerate(trainings)]
    return found if any(len({*of_stage}) > 1 for of_stage in found) else None


class _Stage:
    """A stage on its nodes."""

    def __init__(self, plan: PlacedTraining, stage: int, training: Training) -> None:
        """`training` has the stage's sizes."""
        parallel, layers = plan.training.parallel, plan.partition.layers
        self._training, self._layers = training, sum(layers[stage :: parallel.pipeline])
        held, versions = in_flight(parallel, stage), versions_of(parallel, stage)
        self._memory = partial(memory_of, training, layers, stage, held, versions)
        layout, nodes = parallel.layout, [node for node in plan.nodes for _ in range(node.gpus)]
        places = range(layout.tensors[stage])
        self._rooms = {kind.name: room_gib(kind, training) for kind in plan.kinds}
        self._kinds = [
            min((nodes[layout.rank(stage, replica, place)] for place in places), key=self._room)
            for replica in range(layout.replicas[stage])
        ]
        """The kind of node that each replica lies on; of several that with the least room."""

    def _room(self, kind: NodeKind) -> float:
        return self._rooms[kind.name]

    @cached_property
    def proportions(self) -> list[int]:
        """Return the proportions in which the replicas keep what they share out."""
        if not self._training.shares_by_memory:
            return [1] * len(self._kinds)
        beside = self._memory(part=0.0).of(self._layers)
        return proportions([self._room(kind) * GIB - beside for kind in self._kinds])

    @property
    def held(self) -> list[HeldOnKind]:
        """What ranks hold on each kind of node, the fullest first."""
        numbers = {kind.name: number for kind, number in zip(self._kinds, self.proportions, strict=True)}
        whole = sum(self.proportions)
        parts = {name: number / whole if self._training.shares_by_memory else None for name, number in numbers.items()}
        memory = {part: self._memory(part=part) for part in {*parts.values()}}
        found = [
            HeldOnKind(
                kind=kind,
                proportion=numbers[kind.name],
                memory=with_allowance(kind, self._training, memory[parts[kind.name]]),
                layers=self._layers,
            )
            for kind in {kind.name: kind for kind in self._kinds}.values()
        ]
        return sorted(found, key=lambda one: one.left_gib)


def versions_of(parallel: Parallelism, stage: int) -> int:
    """Count the versions of the weights that a stage holds at once."""
    if parallel.stream is None:
        return 1
    return prove(parallel.stream, 2 * parallel.stream.in_flight + 2 * parallel.stream.period).versions[stage]


def memory_of(
    training: Training, layers: Sequence[int], stage: int, held: int | None, versions: int, part: float | None = None
) -> StageMemory[float]:
    """Work out the memory of a stage, which may be known to hold so many micro-batches. Where its layers are of several
    kinds, a layer takes their mean. Of what replicas share out a rank keeps such a `part`; None: all keep as much."""
    parallel, blocks = training.parallel, training.blocks

    def kept(of_chunks: Sequence[int]) -> float | None:
        return _kept(parallel, of_chunks, stage) if held is None else float(held)

    if len(blocks.kinds) == 1:
        return stage_memory(training, stage, kept(layers[stage :: parallel.pipeline]), versions=versions, part=part)
    of_parts = np.array(blocks.by_kind(layers)[stage :: parallel.pipeline])
    kinds = [
        stage_memory(training, stage, kept(of_parts[:, kind].tolist()), kind, versions, part)
        for kind in range(len(blocks.kinds))
    ]
    counts = of_parts.sum(axis=0)
    shares = (counts / max(1, counts.sum())).tolist()

    def mean(name: str) -> Amount[float]:
        amounts = [getattr(one, name) for one in kinds]
        layer = sum(share * amount.layer for share, amount in zip(shares, amounts, strict=True))
        spared = [amount.spared for amount in amounts if amount.spared is not None]
        if not spared:
            return Amount(layer=layer, fixed=amounts[0].fixed)
        mean_spared = sum(share * one.layer for share, one in zip(shares, spared, strict=True))
        return Amount(layer=layer, fixed=amounts[0].fixed, spared=replace(spared[0], layer=mean_spared))

    return StageMemory(**{name: mean(name) for name in kinds[0].by_term()})


def _kept(parallel: Parallelism, of_chunks: Sequence[int], stage: int) -> float | None:
    """Return of how many micro-batches a layer of a stage keeps its activations, in the mean; None where it has one
    chunk."""
    if parallel.chunks == 1:
        return None
    held = chunks_in_flight(parallel.schedule, parallel.pipeline, parallel.micro_batches, parallel.chunks)[..., stage]
    return float((held @ of_chunks).max()) / max(sum(of_chunks), 1)
