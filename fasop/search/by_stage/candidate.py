"""One layout on nodes in one order: what none of its partitions beats, and the best partition that is found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.allowance import room_gib
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.stages import stage_memory
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.partition.exact import proved_of_paths
from fasop.search.by_stage.bounds import Chains, TripBound, Work, least, least_trip, left, until_returned, ways
from fasop.search.by_stage.longest_paths import LongestPaths
from fasop.search.by_stage.whole_layers import StageTables
from fasop.search.plan import Plan
from fasop.simulation.linear import Linear
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.ranks.columns import ColumnReplay
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, RankColumns, in_flight
from megatron_ext.contract.parallel_config import Schedule

FEW = 2000
"""Partitions that are all tried."""
COLUMNS = 4096
"""Partitions that are replayed together, at most."""


class Candidate:
    """A training whose `parallel` has the layout and all else but the partition, on its nodes.

    Raises:
        SearchError: a profile has no costs for a tensor size.
    """

    def __init__(self, training: Training, nodes: Sequence[NodeKind], work: Work, kinds: Sequence[str]) -> None:
        order = tuple(kind.name for kind in nodes)
        self.training = replace(training, parallel=replace(training.parallel, node_order=order))
        self._nodes, self._work, self._names = nodes, work, kinds
        self._blocks, self._layout = training.blocks, training.parallel.layout
        self._stages = HeterogeneousStages(PlacedTraining(training=self.training, partition=Partition(()), nodes=nodes))
        parallel = self.training.parallel
        self._total = parallel.global_batch_size // parallel.micro_batch_size
        counts = parallel.micro_batches_of if self._layout.even else (self._total,)
        self._counts = [
            counts if self._layout.even else [len(range(replica, self._total, own)) for replica in range(own)]
            for own in self._layout.replicas
        ]
        """Micro-batches of each replica, by stage."""
        self._room, self._taken = self._memory()
        self._known_bound: float | None = None
        self.exhausted = False
        """Whether every partition was looked at."""

    @cached_property
    def _replay(self) -> ColumnReplay:
        counts = self.training.parallel.micro_batches_of if self._layout.even else (self._total,)
        return ColumnReplay(self._layout, str(self.training.parallel.schedule), counts)

    @property
    def steps(self) -> int:
        """Count the steps of a replay."""
        return len(self._replay.steps)

    def _memory(self) -> tuple[Floats, Floats]:
        """[stages]: bytes that layers may take; [stages, kinds]: what a layer of each kind takes."""
        layout, parallel, kinds = self._layout, self.training.parallel, range(len(self._blocks.kinds))
        nodes = {node.name: node for node in self._nodes}
        names = [set[str]() for _ in range(layout.stages)]
        for rank in range(layout.world_size):
            names[layout.stage_dp_tp(rank)[0]].add(self._stages.kinds[rank])
        room, taken = np.empty(layout.stages), np.empty((layout.stages, len(kinds)))
        for size, one in dict(zip(self._stages.sizes, self._stages.trainings, strict=True)).items():
            some = [stage for stage, other in enumerate(self._stages.sizes) if other == size]
            limits = {name: room_gib(nodes[name], one) for name in set[str]().union(*(names[stage] for stage in some))}
            held = [in_flight(parallel, stage) for stage in some]
            of_layer = None if None in held else np.array(held, float)
            of_kinds = [stage_memory(one, np.array(some, float), of_layer, kind) for kind in kinds]
            limit = np.array([min(limits[name] for name in names[stage]) for stage in some])
            room[some] = limit * GIB - of_kinds[0].fixed
            for kind, memory in enumerate(of_kinds):
                taken[some, kind] = memory.layer
        return room, taken

    @property
    def bound(self) -> float:
        """Seconds below which no partition is; infinite if none fits."""
        if self._known_bound is None:
            self._known_bound = self._bound()
        return self._known_bound

    @bound.setter
    def bound(self, raised: float) -> None:
        self._known_bound = raised

    def _bound(self) -> float:
        if (self._room < 0).any():
            return math.inf
        layout, stages, work = self._layout, self._stages, self._work
        empty = stages.columns(np.zeros((layout.stages, 1), np.int64))
        hops = [stages.whole[size].pipelines for size in stages.sizes]
        ahead = [float(one.hop[stage, 0]) for stage, one in enumerate(hops)]
        back = [float((one.hop if one.back is None else one.back.hop)[stage - 1, 0]) for stage, one in enumerate(hops)]
        ending = float(hops[0].least_exposed[0, 0]) + max(stages.embedding(0), stages.embedding(layout.stages - 1))
        found = 0.0
        schedule, replicas = self.training.parallel.schedule, layout.replicas
        for there_and_back, with_sums in ways(schedule):
            own, trip, fixed, through = list[float](), list[float](), list[float](), 0.0
            for stage, counts in enumerate(self._counts):
                size = work.sizes[layout.tensors[stage]]
                ranks = [layout.rank(stage, replica, 0) for replica in range(layout.replicas[stage])]
                every, units, alones = [], list[tuple[float, float]](), list[tuple[float, float]]()
                lag = sum(replicas[:stage]) // replicas[stage]
                for rank, count in zip(ranks, counts, strict=True):
                    kind = self._names.index(stages.kinds[rank])
                    forward, backward = work.forward[size, kind], work.backward[size, kind]
                    alone = float(empty[rank].forward[0, 0]), float(empty[rank].backward[0, 0])
                    back_of = count if with_sums else until_returned(schedule, lag, count, first=stage == 0)
                    every.append((count * forward + back_of * backward, count * alone[0] + back_of * alone[1]))
                    units.append((forward, backward))
                    alones.append(alone)
                of_unit, beside = max(every)
                start = min(float(empty[rank].optimizer[0]) for rank in ranks) if stage == 0 else 0.0
                through += start
                own.append(of_unit + (self._summed(stage) if with_sums else 0.0))
                fixed.append(beside + through + (0.0 if with_sums else ending))
                trip.append(self._least_trip(units, there_and_back))
                through += self._least_trip(alones, there_and_back) + ahead[stage]
                through += back[stage + 1] if not with_sums and stage + 1 < layout.stages else 0.0
            chains = Chains(
                own=np.array([own]),
                trip=np.array([trip]),
                fixed=np.array([fixed]),
                exists=np.ones((1, layout.stages), bool),
            )
            found = max(found, float(least(chains, work.whole)[0]))
        self._own, self._fixed = np.array(own), np.array(fixed)
        return max(found, self._through(empty, sum(ahead[:-1]) + sum(back[1:]), ending, self._queue(hops)))

    def _queue(self, hops: Sequence[Pipelines]) -> float:
        """Seconds for which the busiest link is occupied by the messages of all but one micro-batch; `hops` are those
        of each stage."""
        most = [max(counts) for counts in self._counts]
        ahead = [float(one.occupied[stage, 0]) for stage, one in enumerate(hops)]
        back = [one.occupied if one.back is None else one.back.messages(None)[1] for one in hops]
        queues = [0.0]
        for stage in range(self._layout.stages - 1):
            queues += [(most[stage] - 1) * ahead[stage], (most[stage + 1] - 1) * float(back[stage + 1][stage, 0])]
        return max(queues)

    def rule_out(self, limit: float) -> None:
        """Raise the bound beyond `limit` if whole layers allow no partition within it, where all are alike."""
        if self._can_tighten(limit) and not self._tables.can_share_out(limit):
            self.bound = math.nextafter(limit, math.inf)

    def tighten(self, limit: float) -> None:
        """Raise the bound, beyond `limit` at most, by what whole layers allow where all are alike."""
        if self._can_tighten(limit):
            self.bound = max(self.bound, self._tables.least(self.bound, limit))

    def prove(self, partition: Integers, boxes: int, limit: float) -> tuple[Integers, float]:
        """Raise the bound, beyond `limit` at most, by what the longest paths of waits say in so many boxes
        (`fasop.partition.exact`), where all layers are alike; returns the best partition on the way from this one, and
        its seconds: infinite if neither this one fits nor any that was met."""
        begin, beyond = partition.reshape(-1, 1), math.nextafter(limit, math.inf)
        proof = proved_of_paths(_CandidatePaths(self), self._blocks.layers, begin, boxes, beyond)
        self.bound = max(self.bound, proof.bound)
        return proof.partition[:, 0], proof.seconds

    @property
    def alike(self) -> bool:
        """Whether all layers are."""
        return len(self._blocks.kinds) == 1

    def _can_tighten(self, limit: float) -> bool:
        return self.alike and self.bound < limit < math.inf

    @cached_property
    def _tables(self) -> StageTables:
        amounts = np.tile(np.arange(self._blocks.layers + 1), (self._layout.stages, 1))
        columns, schedule = self._stages.columns(amounts), self.training.parallel.schedule
        return StageTables.of(columns, schedule, self._layout, self._counts, self._layers_at_most)

    @property
    def _layers_at_most(self) -> Integers:
        """[stages]: layers that fit into a stage's memory."""
        found: Integers = np.floor(self._room / self._taken.min(axis=1)).astype(np.int64)
        return found

    def _through(self, empty: Sequence[RankColumns], messages: float, ending: float, queue: float) -> float:
        """The bound by the chain of that name, or by the first micro-batch's trip and the `queue` of the others."""
        layout, work, schedule = self._layout, self._work, self.training.parallel.schedule
        half = schedule.definition.input_share
        trip, units, beside, constant = list[float](), list[float](), list[float](), messages + ending
        for stage, counts in enumerate(self._counts):
            size, every = work.sizes[layout.tensors[stage]], list[tuple[float, float]]()
            ranks = [layout.rank(stage, replica, 0) for replica in range(layout.replicas[stage])]
            kinds = [self._names.index(self._stages.kinds[rank]) for rank in ranks]
            of_kinds = [(float(work.forward[size, kind]), float(work.backward[size, kind])) for kind in kinds]
            alones = [(float(empty[rank].forward[0, 0]), float(empty[rank].backward[0, 0])) for rank in ranks]
            any_replica = schedule is Schedule.gpipe and not layout.even
            for count, unit, alone in zip(counts, of_kinds, alones, strict=True):
                forward, backward = left(schedule, layout, stage, count, self._total)
                there = (min(of_kinds)[0], min(alones)[0]) if any_replica else (unit[0], alone[0])
                every.append((forward * there[0] + backward * unit[1], forward * there[1] + backward * alone[1]))
            of_unit, fixed = max(every)
            units.append(of_unit)
            beside.append(fixed)
            trip.append(self._least_trip(of_kinds, half))
            constant += self._least_trip(alones, half)
            constant += min(float(empty[rank].optimizer[0]) for rank in ranks) if stage == 0 else 0.0
        chain = TripBound(
            np.array([trip]),
            Linear(fixed=np.array([beside]), layer=np.array([units])),
            np.ones((1, layout.stages), bool),
            np.array([constant]),
        )
        room = self._layers_at_most
        if self.alike and np.minimum(room, self._blocks.layers).sum() < self._blocks.layers:
            return math.inf
        queued = constant + work.whole * min(trip) + queue
        return max(queued, float(chain.least(work.whole, room[np.newaxis], alike=self.alike)[0]))

    def _least_trip(self, times: Sequence[tuple[float, float]], share: float) -> float:
        """Seconds through one of the replicas that take these times, forward and backward, at least."""
        forward, backward = zip(*times, strict=True)
        return least_trip(forward, backward, share, even=self._layout.even)

    def _summed(self, stage: int) -> float:
        """Seconds in which the gradients of a unit of work are summed and no backward pass hides it, at least."""
        one, units = self._stages.whole[self._stages.sizes[stage]].pipelines, self._work.units
        exposed = one.sums.layer - (0.0 if one.hidden is None else one.hidden.time.layer)
        of_kinds = np.broadcast_to(exposed, (*exposed.shape[:-2], self._layout.stages, 1))[..., stage, 0].reshape(-1)
        some = units > 0
        return max(0.0, float((of_kinds[some] / units[some]).min())) if some.any() else 0.0

    def _over(self, partitions: Integers) -> Floats:
        """[partitions]: bytes that stages lack, together."""
        cuts = np.concatenate([np.zeros((1, partitions.shape[1]), np.int64), np.cumsum(partitions, axis=0)])
        counts = np.diff(self._blocks.counts[:, cuts], axis=1)
        taken = np.einsum("sk,ksp->sp", self._taken, counts)
        over: Floats = np.maximum(0.0, taken - self._room[:, np.newaxis]).sum(axis=0)
        return over

    def seconds(self, partitions: Integers) -> Floats:
        """[partitions]: of an iteration; infinite where a stage does not fit into memory."""
        fits = self._over(partitions) == 0
        found: Floats = np.full(partitions.shape[1], np.inf)
        for begin in range(0, partitions.shape[1], COLUMNS):
            some = np.nonzero(fits)[0]
            some = some[(some >= begin) & (some < begin + COLUMNS)]
            if len(some):
                found[some] = self._replay.seconds(self._stages.columns(partitions[:, some]))
        return found

    @property
    def few(self) -> bool:
        layers, stages = self._blocks.layers, self._layout.stages
        return math.comb(layers + stages - 1, layers) <= FEW

    def every(self) -> Integers:
        """[stages, partitions]: all."""
        layers, stages = self._blocks.layers, self._layout.stages
        bars = np.array([*combinations(range(layers + stages - 1), stages - 1)], np.int64).reshape(-1, stages - 1)
        ends = np.full((len(bars), 1), layers + stages - 1)
        found: Integers = np.diff(np.hstack([np.full((len(bars), 1), -1), bars, ends])).T - 1
        return found

    def balanced(self) -> Integers:
        """[stages, 1]: stages take as long as each other for all their micro-batches, as nearly as whole layers allow;
        or the nearest that fits into memory, if there is one."""
        assert math.isfinite(self.bound), "no partition fits"
        of_layers = self._work.units[np.array(self._blocks.sequence, np.int64)]
        done = np.concatenate([[0.0], np.cumsum(of_layers)])
        begin = self._fixed - self._fixed.min()
        share = 1 / np.maximum(self._own, 1e-30)
        level = (done[-1] + (share * begin).sum()) / share.sum()
        wanted = np.maximum(0.0, share * (level - begin))
        ends = np.cumsum(wanted) / max(wanted.sum(), 1e-30) * done[-1]
        cuts = np.searchsorted((done[:-1] + done[1:]) / 2, ends[:-1])
        found: Integers = np.diff(np.concatenate([[0], cuts, [len(of_layers)]])).reshape(-1, 1)
        while (over := self._over(found)[0]) > 0:
            near = self._near(found[:, 0])
            short = self._over(near)
            best = int(np.argmin(short))
            if short[best] >= over:
                break
            found = near[:, [best]]
        return found

    def _near(self, partition: Integers) -> Integers:
        """[stages, partitions]: a layer goes from any stage to any other; where layers differ, a cut elsewhere."""
        return np.array([*self._neighbours(partition)], np.int64).reshape(-1, len(partition)).T

    def _neighbours(self, partition: Integers) -> Iterator[Integers]:
        stages = range(len(partition))
        if len(self._blocks.kinds) == 1:
            for source in stages:
                for target in stages:
                    if source != target and partition[source]:
                        moved = partition.copy()
                        moved[source] -= 1
                        moved[target] += 1
                        yield moved
            return
        for stage in stages[:-1]:
            both = int(partition[stage] + partition[stage + 1])
            for held in range(both + 1):
                if held != partition[stage]:
                    moved = partition.copy()
                    moved[stage], moved[stage + 1] = held, both - held
                    yield moved

    def search(self, limit: float, begin: Sequence[int] | None = None) -> tuple[Integers, float, int]:
        """The best partition that is found, its seconds, and how many steps of replays that took.

        Args:
            limit: seconds; from a partition that takes much longer no better ones are looked for.
            begin: a partition from which to begin if it is better than the balanced one.
        """
        if self.few:
            table = self.every()
            taken = self.seconds(table)
            best = int(np.argmin(taken))
            self.exhausted = True
            return table[:, best], float(taken[best]), self.steps
        begins = np.hstack([self.balanced(), *([] if begin is None else [np.array([begin]).T])])
        at_begin, steps = self.seconds(begins), self.steps
        found, seconds = begins[:, [np.argmin(at_begin)]], float(at_begin.min())
        while seconds < limit:
            near = self._near(found[:, 0])
            taken = self.seconds(near)
            best, steps = int(np.argmin(taken)), steps + self.steps
            if taken[best] >= seconds:
                break
            found, seconds = near[:, [best]], float(taken[best])
        return found[:, 0], seconds, steps

    def plan(self, partition: Integers) -> Plan:
        """Return the plan as a search shows it."""
        layers = Partition(tuple(partition.tolist()))
        parallel = replace(self.training.parallel, partition=layers.layers)
        total = float(self.seconds(partition.reshape(-1, 1))[0])
        return Plan(
            training=replace(self.training, parallel=parallel),
            partition=layers,
            nodes=self._nodes,
            total=total,
            bound=total if self.exhausted else min(self.bound, total),
            basis=self._stages.basis,
            pipelines=None,
        )


class _CandidatePaths(LongestPaths):
    """The `fasop.partition.exact.Paths` of a candidate."""

    def __init__(self, one: Candidate) -> None:
        super().__init__(one._stages, one._replay, one._blocks.layers)
        self._one = one
        self.parts, self.capacity = one._layout.stages, one._layers_at_most

    def seconds(self, partition: Integers) -> float:
        return float(self._one.seconds(partition)[0])

    def broken(self, partition: Integers) -> tuple[Floats, Floats] | None:
        fits = (partition <= self.capacity).all()
        return None if fits else (np.zeros((0, self.parts)), np.zeros(0))
