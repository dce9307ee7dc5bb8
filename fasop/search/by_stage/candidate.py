"""One layout on nodes in one order: what none of its partitions beats, and the best partition that is found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from conf.schema.values.partition import Partition
from fasop.costs.arrays import Bools, Floats, Integers, distinct_rows
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.allowance import room_gib
from fasop.costs.memory.amounts import GIB, most_layers
from fasop.costs.memory.stages import stage_memory
from fasop.costs.training import PlacedTraining, Training
from fasop.frozen import replace
from fasop.partition.exact import proved_of_paths
from fasop.partition.local_search import between_bars, partition_count
from fasop.partition.possible_stages import PossibleStages
from fasop.search.by_stage.bounds.chains import Chains, TripBound, Work, least, least_trip, left, until_returned, ways
from fasop.search.by_stage.bounds.layout_batch import UnlikeReplicas
from fasop.search.by_stage.bounds.longest_paths import LongestPaths
from fasop.search.by_stage.bounds.unlike_layers import chains_of_layout
from fasop.search.by_stage.bounds.whole_layers import StageTables
from fasop.search.plan import Plan
from fasop.simulation.linear import Linear
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.ranks.columns import ColumnReplay, RankTables
from fasop.simulation.ranks.heterogeneous_stages import HeterogeneousStages, RankColumns, in_flight
from megatron_ext.contract.parallel_config import Schedule

FEW = 2000
"""Partitions that are all tried."""
COLUMNS = 4096
"""Partitions that are replayed together, at most."""
FIRST_MOVES = 4
"""How many moves, those that make an iteration least longer, are tried with a second one. (With 4, of 200 layouts of
up to 5 stages and 24 layers 1 instead of 17 takes more than 0.5 % longer than with its best partition.)"""


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
        for stage, name in dict.fromkeys(self._stages.places):
            names[stage].add(name)
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
        layout, stages, work, schedule = self._layout, self._stages, self._work, self.training.parallel.schedule
        unlike = UnlikeReplicas.of(layout, self._counts, stages.kinds)
        ranks, counts, first = unlike.ranks.tolist(), unlike.counts, (np.arange(layout.stages) == 0)[:, np.newaxis]
        kinds = np.array([[self._names.index(stages.kinds[rank]) for rank in some] for some in ranks])
        size = np.array([work.sizes[tensor] for tensor in layout.tensors])[:, np.newaxis]
        empty = self._columns  # their first column
        alone = np.array([[(empty[rank].forward[0, 0], empty[rank].backward[0, 0]) for rank in some] for some in ranks])
        passes = np.stack([[work.forward[size, kinds], work.backward[size, kinds]], np.moveaxis(alone, 2, 0)])
        hops = [stages.whole[one].pipelines for one in stages.sizes]
        ahead = np.array([one.hop[stage, 0] for stage, one in enumerate(hops)])
        back = np.array([(one.back or one).hop[stage - 1, 0] for stage, one in enumerate(hops)])
        ahead[-1] = back[0] = 0.0
        ending = float(hops[0].least_exposed[0, 0]) + max(stages.embedding(0), stages.embedding(layout.stages - 1))
        start = min(float(empty[rank].optimizer[0]) for rank in ranks[0])
        own, trip, fixed = np.zeros((3, 2, layout.stages))
        for number, (there_and_back, with_sums) in enumerate(ways(schedule)):
            returned = until_returned(schedule, unlike.lag[:, np.newaxis], counts, first=first)
            own[number], fixed[number] = _longest(passes, counts, counts if with_sums else returned)
            trip[number], through = (least_trip(part, there_and_back, even=layout.even) for part in passes)
            through += ahead + (0.0 if with_sums else np.append(back[1:], 0.0))
            fixed[number, 1:] += np.cumsum(through)[:-1]
            if with_sums:
                own[number] += self._summed
            else:
                fixed[number] += ending
        fixed += start
        self._own, self._fixed = own[-1], fixed[-1]
        chains = Chains(own=own, trip=trip, fixed=fixed, exists=np.ones(own.shape, bool))
        constant = float(ahead.sum() + back.sum()) + ending + start
        return max(float(least(chains, work.whole).max()), self._through(unlike, passes, constant, self._queue(hops)))

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
        """Raise the bound beyond `limit` if whole layers allow no partition within it."""
        if self.bound < limit < math.inf:
            beyond = math.nextafter(limit, math.inf)
            within = self._tables.can_share_out(limit) if self.alike else self._possible.below(beyond).any()
            self.bound = self.bound if within else beyond

    def tighten(self, limit: float) -> None:
        """Raise the bound, beyond `limit` at most, by what whole layers allow."""
        if self.bound < limit < math.inf:
            least = self._tables.least if self.alike else self._possible.least
            self.bound = max(self.bound, least(self.bound, limit))

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

    @cached_property
    def _possible(self) -> PossibleStages:
        counts, schedule = self._blocks.counts, self.training.parallel.schedule
        taken = np.einsum("sk,kbe->sbe", self._taken, counts[:, np.newaxis] - counts[..., np.newaxis])
        fits = np.triu(taken <= self._room[:, np.newaxis, np.newaxis])
        layers = self._blocks.layers
        return PossibleStages(fits, [chains_of_layout(self._stages, layers, schedule, self._layout, self._counts)])

    @cached_property
    def _tables(self) -> StageTables:
        schedule = self.training.parallel.schedule
        return StageTables.of(self._columns, schedule, self._layout, self._counts, self._layers_at_most)

    @cached_property
    def _columns(self) -> list[RankColumns]:
        """What each rank takes if its stage has no layers and, where all are alike, one, two, up to all of them."""
        amounts = np.arange(self._blocks.layers + 1 if self.alike else 1)
        return self._stages.columns(np.tile(amounts, (self._layout.stages, 1)))

    @cached_property
    def _rank_tables(self) -> RankTables:
        return self._replay.tables(self._columns)

    @property
    def _layers_at_most(self) -> Integers:
        """[stages]: layers that fit into a stage's memory."""
        return most_layers(self._room, self._taken.min(axis=1))

    def _through(self, unlike: UnlikeReplicas, passes: Floats, constant: float, queue: float) -> float:
        """The bound by the chain of that name, or by the first micro-batch's trip and the `queue` of the others.

        Args:
            passes: [2, 2, stages, replicas]: seconds of a unit, and beside units, forward and backward.
            constant: seconds of the trip's messages, and of what precedes and follows it.
        """
        layout, work, schedule = self._layout, self._work, self.training.parallel.schedule
        trip, ends = (least_trip(part, schedule.definition.input_share, even=layout.even) for part in passes)
        constant += float(ends.sum())
        if schedule is Schedule.gpipe and not layout.even:  # of any replica
            quickest = np.broadcast_to(passes[:, 0].min(axis=2, keepdims=True), passes[:, 0].shape)
            passes = np.stack([quickest, passes[:, 1]], axis=1)
        units, beside = _longest(passes, *left(schedule, unlike, self._total))
        left_over = Linear(fixed=beside[np.newaxis], layer=units[np.newaxis])
        chain = TripBound(trip[np.newaxis], left_over, np.array([constant]))
        room = self._layers_at_most
        if self.alike and np.minimum(room, self._blocks.layers).sum() < self._blocks.layers:
            return math.inf
        queued = constant + work.whole * float(trip.min()) + queue
        return max(queued, float(chain.least(work.whole, room[np.newaxis] if self.alike else None)[0]))

    @property
    def _summed(self) -> Floats:
        """[stages]: seconds in which the gradients of a unit of work are summed and no backward pass hides it, at
        least."""
        sizes, units, found = np.array(self._stages.sizes), self._work.units, np.zeros(self._layout.stages)
        some = units > 0
        for size, lines in self._stages.whole.items() if some.any() else ():
            one, mine = lines.pipelines, (sizes == size).all(axis=1)
            exposed = one.sums.layer - (0.0 if one.hidden is None else one.hidden.time.layer)
            of_kinds = np.broadcast_to(exposed, (*exposed.shape[:-2], len(found), 1)).reshape(-1, len(found))
            found[mine] = np.maximum(0.0, (of_kinds[some] / units[some, np.newaxis]).min(axis=0))[mine]
        return found

    def _over(self, partitions: Integers) -> Floats:
        """[partitions]: bytes that stages lack, together."""
        cuts = np.concatenate([np.zeros((1, partitions.shape[1]), np.int64), np.cumsum(partitions, axis=0)])
        counts = np.diff(self._blocks.counts[:, cuts], axis=1)
        taken = np.einsum("sk,ksp->sp", self._taken, counts)
        return np.maximum(0.0, taken - self._room[:, np.newaxis]).sum(axis=0)

    def seconds(self, partitions: Integers) -> Floats:
        """[partitions]: of an iteration; infinite where a stage does not fit into memory."""
        fits = self._over(partitions) == 0
        found: Floats = np.full(partitions.shape[1], np.inf)
        if self.alike:
            found[fits] = self._replay.of_layers(self._rank_tables, partitions[:, fits])
            return found
        for begin in range(0, partitions.shape[1], COLUMNS):
            some = np.nonzero(fits)[0]
            some = some[(some >= begin) & (some < begin + COLUMNS)]
            if len(some):
                found[some] = self._replay.seconds(self._stages.columns(partitions[:, some]))
        return found

    def _may_take_less(self, partitions: Integers, seconds: float) -> Bools:
        """[partitions]: which may take less than so many seconds, by what bounds stages of so many layers."""
        if not self.alike:
            return np.ones(partitions.shape[1], bool)
        return np.asarray(self._tables.least_of(partitions) < seconds)

    @property
    def few(self) -> bool:
        return partition_count(self._blocks.layers, self._layout.stages) <= FEW

    def every(self) -> Integers:
        """[stages, partitions]: all."""
        layers, stages = self._blocks.layers, self._layout.stages
        bars = [*combinations(range(layers + stages - 1), stages - 1)]
        return between_bars(np.array(bars, np.int64).reshape(len(bars), -1), layers)

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

    def begins(self, others: Sequence[Sequence[int]]) -> Integers:
        """[stages, partitions]: the balanced one, and others."""
        return np.hstack([self.balanced(), *(np.array([one]).T for one in others)])

    def _near(self, partition: Integers) -> Integers:
        """[stages, partitions]: a layer goes from any stage to any other; where layers differ, also several from a
        stage to its neighbour."""
        if self.alike:
            near: Integers = partition[:, np.newaxis] + self._moves
            return near[:, near.min(axis=0) >= 0]
        return np.array([*self._neighbours(partition)], np.int64).reshape(-1, len(partition)).T

    @cached_property
    def _moves(self) -> Integers:
        """[stages, moves]: a layer less in a stage, and one more in another."""
        one, pairs = np.identity(self._layout.stages, np.int64), [*permutations(range(self._layout.stages), 2)]
        source, target = np.array(pairs, np.int64).reshape(-1, 2).T
        moves: Integers = one[:, target] - one[:, source]
        return moves

    def _neighbours(self, partition: Integers) -> Iterator[Integers]:
        for source, target in permutations(range(len(partition)), 2):
            most = int(partition[source]) if abs(source - target) == 1 else 1
            for count in range(1, min(most, int(partition[source])) + 1):
                moved = partition.copy()
                moved[source] -= count
                moved[target] += count
                yield moved

    def search(
        self, limit: float, begins: Sequence[Sequence[int]] = (), close: float = 0.0
    ) -> tuple[Integers, float, int]:
        """The best partition that is found, its seconds, and how many steps of replays that took.

        Args:
            limit: seconds; from a partition that takes longer no better ones are looked for.
            begins: partitions from which to begin if one is better than the balanced one.
            close: seconds; from a partition that takes less two moves at once are tried where none gains alone.
        """
        if self.few:
            table = self.every()
            taken = self.seconds(table)
            best = int(np.argmin(taken))
            self.exhausted = True
            return table[:, best], float(taken[best]), self.steps
        every = self.begins(begins)
        at_begin, steps = self.seconds(every), self.steps
        found, seconds = every[:, [np.argmin(at_begin)]], float(at_begin.min())
        while seconds < limit:
            near = self._near(found[:, 0])
            taken, worth = np.full(near.shape[1], np.inf), self._may_take_less(near, seconds)
            taken[worth] = self.seconds(near[:, worth])
            steps += self.steps
            if taken.min(initial=np.inf) >= seconds and seconds < close:
                taken[~worth] = self.seconds(near[:, ~worth])
                first = near[:, np.argsort(taken, kind="stable")[:FIRST_MOVES]]
                near = distinct_rows(np.hstack([self._near(one) for one in first.T]).T).T
                near = near[:, self._may_take_less(near, seconds)]
                taken, steps = self.seconds(near), steps + self.steps
            if not len(taken):
                break
            best = int(np.argmin(taken))
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


def _longest(passes: Floats, forward: Integers | Floats, backward: Integers | Floats) -> tuple[Floats, Floats]:
    """[stages] each: seconds of so many passes of the replica that takes longest for a unit of work, and beside units;
    passes are as in `Candidate._through`, their numbers [stages, replicas]."""
    of_unit, beside = forward * passes[:, 0] + backward * passes[:, 1]
    most = of_unit.max(axis=1)
    return most, np.where(of_unit == most[:, np.newaxis], beside, -np.inf).max(axis=1)


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
