"""Everything that a search looks at: sizes and node orders that are possible and fit into memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product

import numpy as np

from conf.schema.values.partition import Shares
from fasop.costs.arrays import Bools, Floats, Integers
from fasop.costs.hardware import NodeKind, gpus_of
from fasop.costs.layers import measured_tensor_sizes
from fasop.costs.parallelism import Parallelism
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.partition.dominance import distinct, never_worse
from fasop.partition.local_search import Worth, feasible
from fasop.search.bounds.gpu_classes import Way
from fasop.search.bounds.lower_bound import LowerBounds, quickest
from fasop.search.space import node_orders
from fasop.search.space.choices import Choices
from fasop.simulation.nodes import Nodes, times_on
from fasop.simulation.pipelines import Pipelines, joined
from fasop.simulation.replica_pipelines import by_replica
from megatron_ext.contract.models.counts import experts_of
from megatron_ext.contract.parallel_config import GATHERED, Recompute, Schedule
from megatron_ext.contract.rules.engine import LATENT

MOST_MICRO_BATCHES = 2**12
"""Micro-batches of a replica in an iteration, at most: every one of them is simulated."""
LONG = 4096
"""Tokens that each of the ranks that share sequences has at least, where nobody asks for others."""
KEPT = 2**13
"""Nodes, in all orders, sizes and options together, whose pipelines are kept: a search comes back to a few of them."""
FEW_LEFT = 0.25
"""The part of all sizes that bounds leave, at most, where options of all of these are bounded together."""
MOST_REPLICAS = 1024
"""Replicas, at most: each may have a share of its own."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Plans of the same sizes and schedule, on nodes with the same numbers of GPUs: one for each option and node order
    that makes a difference.
    """

    options: Sequence[Training]
    kinds: Sequence[NodeKind]
    option: Integers
    """[candidates]: the number of each one's option."""
    orders: Integers
    """[candidates, nodes]: the kind of each node."""
    pipelines: Pipelines

    def __len__(self) -> int:
        return len(self.orders)

    @property
    def layers(self) -> int:
        return self.options[0].blocks.layers

    def training(self, column: int) -> Training:
        """Return the training of one candidate."""
        return self.options[int(self.option[column])]

    def take(self, columns: Integers) -> Candidates:
        return replace(
            self,
            option=self.option[columns],
            orders=self.orders[columns],
            pipelines=self.pipelines.take(columns),
        )


class Space:
    """Every way to cut a training over all of some nodes: sizes with a schedule, by number.

    Only what is needed is built. `bounds` keeps what many sets of the same nodes have in common. Replicas take equally
    many micro-batches; those of an `uneven` space cannot, and one of them takes one more than another.
    """

    def __init__(
        self,
        training: Training,
        kinds: Sequence[NodeKind],
        choices: Choices,
        bounds: LowerBounds | None = None,
        *,
        uneven: bool = False,
    ) -> None:
        self.kinds = [kind for kind in kinds if kind.group.count]
        self._training, self._choices, self.uneven = training, choices, uneven
        self._bounds = bounds or LowerBounds(self.kinds)
        self._key = gpus_of(self.kinds), *tensor_sizes(training, self.kinds), uneven
        if self._key not in self._bounds.sizes:
            self._bounds.sizes[self._key] = [*sizes(training, self.kinds, choices, uneven=uneven)]
        self._sized = self._bounds.sizes[self._key]
        if self._key not in self._bounds.cuts:
            self._bounds.cuts[self._key] = [
                (number, schedule, chunks)
                for schedule, chunks in choices.ways
                for number, one in enumerate(self._sized)
                if self._runs(one, schedule, chunks)
            ]
        self._cuts = self._bounds.cuts[self._key]
        self._raised = np.zeros(len(self._cuts), bool)
        self._of_ways: dict[tuple[Way, bool], Floats] = {}
        """Bounds of each number by the way and whether replicas share the optimizer, as far as they are known."""

    @cached_property
    def floor(self) -> float:
        """Seconds below which no plan is, found in much less time than `bounds`; infinite if there is none."""
        return self._bounds.of_work(self._sized, self._choices.recompute, self.kinds)

    @cached_property
    def known(self) -> Floats:
        """Seconds below which no plan of each number is, on whatever order of the nodes: at first if each GPU does its
        part of the work and none waits; whoever proves more of one raises it."""
        of_sizes = self._bounds.of_each_work(self._sized, self._choices.recompute, self.kinds)
        return of_sizes[[place for place, *_ in self._cuts]]

    def raise_known(self, worth: Worth) -> None:
        """Raise those that are of `worth` to what the chains of waits say, which takes longer."""
        raise_known([self], [worth])

    def _with(self, sharded: bool) -> Sequence[Training]:
        """All sizes, with a sharded optimizer or without."""
        key = *self._key, sharded
        if key not in self._bounds.sizes:
            self._bounds.sizes[key] = [
                one
                if one.parallel.sharded_optimizer == sharded
                else replace(one, parallel=replace(one.parallel, sharded_optimizer=sharded))
                for one in self._sized
            ]
        return self._bounds.sizes[key]

    @property
    def known_of_some(self) -> Floats:
        """Like `known`, of plans that compute only some of their layers again, too: where none that computes nothing
        again fits, `known` is raised beyond these."""
        found = self.known
        for (way, _), bounds in self._of_ways.items():
            if way.recompute is Recompute.none:
                found = np.fmin(found, bounds)
        return found

    @property
    def least(self) -> float:
        """Seconds below which no plan is, as far as it is known; infinite if there is none."""
        if not len(self):
            return np.inf
        return float(self.known.min()) if self.is_bounded else self.floor

    @property
    def is_bounded(self) -> bool:
        """Whether bounds of its sizes were needed before, and are known."""
        return "known" in vars(self)

    def _runs_as(self, schedule: Schedule, chunks: int) -> Bools:
        """[numbers]: whether each is of that schedule."""
        known, key = self._bounds.runs_as, (self._key, schedule, chunks)
        if key not in known:
            known[key] = np.array([way == [schedule, chunks] for _, *way in self._cuts], bool)
        return known[key]

    def _runs(self, one: Training, schedule: Schedule, chunks: int) -> bool:
        return self._choices.runs(one.parallel, schedule, chunks, one.model, one.engine)

    def __len__(self) -> int:
        return len(self._cuts)

    @property
    def nodes(self) -> list[int]:
        """How many of each kind."""
        return [kind.group.count for kind in self.kinds]

    @cached_property
    def few(self) -> bool:
        """Whether all node orders are among the first."""
        of_size = Counter[int]()
        for kind in self.kinds:
            of_size[kind.gpus] += kind.group.count
        layers = self._training.blocks.layers
        return node_orders.few(self.nodes, layers) and node_orders.few_shapes([*of_size.values()], layers)

    @cached_property
    def first(self) -> list[Nodes]:
        """The node orders that are looked at in any case."""
        if self.few:
            return self.in_orders(node_orders.orders(self.nodes))
        fastest = fastest_first(self.kinds, self._sized[0])
        found = node_orders.starts([self.nodes[kind] for kind in fastest])
        return self.in_orders(np.array(fastest)[found])

    def begin_with(self, nodes: Sequence[NodeKind]) -> None:
        """Look at the node order of a plan, too, where there are too many to look at all, if it is on these nodes."""
        for new in self._order_of(nodes) if not self.few else ():
            if not any((known.orders == new.orders).all(axis=1).any() for known in self.first):
                self.first.append(new)

    def _order_of(self, nodes: Sequence[NodeKind]) -> list[Nodes]:
        """The order of these nodes of a plan; none if it is on others."""
        if len(nodes) != sum(self.nodes):
            return []
        names = [kind.name for kind in self.kinds]
        if Counter(node.name for node in nodes) != Counter({kind.name: kind.group.count for kind in self.kinds}):
            return []
        return self.in_orders(np.array([[names.index(node.name) for node in nodes]]))

    def every(self, most: int) -> list[Nodes] | None:
        """All node orders; None if there are more than so many."""
        return self.in_orders(node_orders.orders(self.nodes)) if node_orders.at_most(self.nodes, most) else None

    def in_orders(self, every: Integers) -> list[Nodes]:
        """Node orders, those together that have the same numbers of GPUs in each place."""
        shapes = np.array([kind.gpus for kind in self.kinds])[every]
        _, number = np.unique(shapes, axis=0, return_inverse=True)
        return [Nodes(self.kinds, every[number.reshape(-1) == i]) for i in range(number.max() + 1)]

    def options(self, number: int) -> list[Training]:
        """All options of these sizes, which sets of nodes that have the same sizes share."""
        known, key = self._bounds.options, (self._key, self._cuts[number])
        if key not in known:
            place, schedule, chunks = self._cuts[number]
            sized = self._sized[place]
            parallel = replace(sized.parallel, schedule=schedule, chunks=chunks)
            variants = [replace(sized, parallel=variant) for variant in self._choices.variants(parallel)]
            known[key] = [one for one in variants if _shares_sequence(one)]
        return known[key]

    def bounds(self, number: int, options: Sequence[Training], worth: Worth) -> Floats:
        """[options]: seconds below which no plan of these sizes with each option is, on whatever order of the nodes; of
        what computes layers again those of what does not, where these are not `worth` it."""
        found, left = np.zeros(len(options)), defaultdict[Way, list[int]](list)
        for place, option in enumerate(options):
            way, sharded = Way.of(option.parallel), option.parallel.sharded_optimizer
            found[place] = self._bound_of(number, way._replace(recompute=Recompute.none), sharded)
            if np.isnan(found[place]) or (way.recompute is not Recompute.none and worth(found[place : place + 1])[0]):
                found[place] = self._bound_of(number, way, sharded)
                if np.isnan(found[place]):
                    left[way].append(place)
        for way, places in left.items():
            found[places] = self._bounds.of([options[place] for place in places], way, self.kinds, worth)
        return found

    def _bound_of(self, number: int, way: Way, sharded: bool) -> float:
        """What is known of these sizes that go that way; nan where nothing is."""
        known = self._of_ways.get((way, sharded))
        return np.nan if known is None else float(known[number])

    def built(self, number: int, nodes: Sequence[Nodes], options: Sequence[Training] | None = None) -> list[Candidates]:
        """All options, or these, in such orders as fit into memory with some partition, and are worth a look."""
        wanted = self.options(number) if options is None else options
        return [group for some in nodes if (group := fitting(wanted, some, self._lines)) is not None]

    def _lines(self, one: Training, nodes: Nodes) -> Pipelines:
        """Do as `by_replica`, of which those in the first orders are kept."""
        if not any(nodes is some for some in self.first):
            return by_replica(one, nodes)
        kept = self._bounds.pipelines
        if (found := kept.get((nodes, one.parallel))) is None:
            if len(kept) * nodes.orders.size > KEPT:
                kept.clear()
            found = kept[nodes, one.parallel] = by_replica(one, nodes)
        return found

    def beside(self, training: Training, nodes: Sequence[NodeKind], worth: Worth) -> Iterator[Candidates]:
        """All schedules of as many chunks and options of the sizes of a plan, in its node order, that may be of worth;
        none if it is on other nodes."""
        order = self._order_of(nodes)
        if not order:
            return
        sizes = _sizes_alone(training.parallel)
        for number, (place, _, chunks) in enumerate(self._cuts):
            alike = chunks == training.parallel.chunks and _sizes_alone(self._sized[place].parallel) == sizes
            if alike and worth(self.known[number : number + 1])[0]:
                options = self.options(number)
                some = np.nonzero(worth(self.bounds(number, options, worth)))[0]
                yield from self.built(number, order, [options[one] for one in some])

    @property
    def groups(self) -> Iterator[Candidates]:
        """All that fit, in the first orders."""
        return (group for number in range(len(self)) for group in self.built(number, self.first))


def raise_known(spaces: Sequence[Space], worths: Sequence[Worth]) -> None:
    """Do as `Space.raise_known` of spaces of one training on sets of nodes of the same kinds, together, which takes
    less time; `worths` are of each."""
    choices, of_worth = spaces[0]._choices, [worth(space.known) for space, worth in zip(spaces, worths, strict=True)]
    some = [wanted & ~space._raised for space, wanted in zip(spaces, of_worth, strict=True)]
    for schedule, chunks in choices.ways if any(map(np.any, some)) else ():
        here = _parts_of(schedule, chunks, spaces, some, worths)
        every = [_bounded_together(here, Way(schedule, chunks, one)) for one in quickest(choices.recompute)]
        for (space, numbers, _), *found in zip(here, *every, strict=True):
            space.known[numbers] = np.maximum(np.min(found, axis=0), space.known[numbers])
    for space, wanted, worth in zip(spaces, some, worths, strict=True):
        new = np.nonzero(wanted & worth(space.known))[0]
        if space._training.parallel.zero and len(new):
            places = [space._cuts[number][0] for number in new]
            sized = ([space._with(sharded)[place] for place in places] for sharded in choices.sharded_optimizer)
            rounds = [space._bounds.of_rounds(plans, space.kinds) for plans in sized]
            space.known[new] = np.maximum(space.known[new], np.min(rounds, axis=0))
        space._raised |= wanted


def bound_options(spaces: Sequence[Space], worths: Sequence[Worth]) -> None:
    """Bound the options that take longer than others of all sizes whose `known` is raised and still of worth, as
    `raise_known` does, if these are few: one by one they take longer."""
    choices = spaces[0]._choices
    some = [space._raised & worth(space.known) for space, worth in zip(spaces, worths, strict=True)]
    if sum(map(np.count_nonzero, some)) > FEW_LEFT * sum(map(len, spaces)):
        return
    for schedule, chunks in choices.ways:
        here = _parts_of(schedule, chunks, spaces, some, worths)
        for one in choices.recompute:
            if one not in quickest(choices.recompute):
                _bounded_together(here, Way(schedule, chunks, one))


_Part = tuple[Space, Integers, Worth]
"""Numbers of a space, and what seconds of it are of worth."""


def _parts_of(
    schedule: Schedule, chunks: int, spaces: Sequence[Space], some: Sequence[Bools], worths: Sequence[Worth]
) -> list[_Part]:
    """List the numbers of that schedule, of those that are wanted of each space, where there are any."""
    rows = [np.nonzero(space._runs_as(schedule, chunks) & of)[0] for space, of in zip(spaces, some, strict=True)]
    return [part for part in zip(spaces, rows, worths, strict=True) if len(part[1])]


def _bounded_together(parts: Sequence[_Part], way: Way) -> list[Floats]:
    """Bounds of the numbers of each part that go that way, at least, with a sharded optimizer and without; the spaces
    keep both."""
    if not parts:
        return []
    every = [(sharded, *part) for sharded in parts[0][0]._choices.sharded_optimizer for part in parts]
    ends = np.cumsum([len(numbers) for _, _, numbers, _ in every])[:-1]
    plans, sets = list[Training](), list[Sequence[NodeKind]]()
    for sharded, space, numbers, _ in every:
        sized = space._with(sharded)
        plans += [sized[space._cuts[number][0]] for number in numbers.tolist()]
        sets += [space.kinds] * len(numbers)
    of_worth = partial(_of_parts, [worth for *_, worth in every], ends)
    bounds = np.split(parts[0][0]._bounds.of_sets(plans, way, sets, of_worth), ends)
    for (sharded, space, numbers, _), found in zip(every, bounds, strict=True):
        space._of_ways.setdefault((way, sharded), np.full(len(space), np.nan))[numbers] = found
    return [np.min(bounds[place :: len(parts)], axis=0) for place in range(len(parts))]


def _of_parts(worths: Sequence[Worth], ends: Integers, seconds: Floats) -> Bools:
    """Whether seconds are of worth, of which each part, up to one of the ends, has a worth of its own."""
    return np.concatenate([worth(part) for worth, part in zip(worths, np.split(seconds, ends), strict=True)])


def _sizes_alone(parallel: Parallelism) -> tuple[object, ...]:
    sizes = parallel.tensor_size, parallel.data, parallel.pipeline, parallel.expert, parallel.context
    return *sizes, parallel.micro_batch_size, parallel.shares


def fastest_first(kinds: Sequence[NodeKind], training: Training) -> list[int]:
    """The numbers of kinds, by the time of their layers."""
    times = [times_on(kind, training).layers for kind in kinds]
    return sorted(range(len(times)), key=lambda kind: sum(one.forward + one.backward for one in times[kind]))


def sizes(
    training: Training,
    kinds: Sequence[NodeKind],
    choices: Choices | None = None,
    most: float = MOST_MICRO_BATCHES,
    *,
    uneven: bool = False,
) -> Iterator[Training]:
    """Every division of all GPUs and of the batch, in increasing order of tensor, data and micro-batch size.

    A tensor group lies inside a node, and was measured where the model was. A pipeline has no more stages than layers
    and one each for embedding and head, where there are such. Options are as in `training`. A replica has at most so
    many micro-batches, and as many as every other one; if `uneven`, of the sizes where that is impossible, their shares
    are as even as they can be. Only tdpp's own engine has such.
    """
    parallel, most_stages = training.parallel, training.blocks.most_stages
    gpus, tried = gpus_of(kinds), None if choices is None else choices.pipeline
    if uneven and (training.equal_only or parallel.zero == GATHERED):
        return  # megatron_ext.contract.rules.memory
    for tensor in tensor_sizes(training, kinds):
        for data in divisors(gpus // tensor):
            pipeline = gpus // tensor // data
            if pipeline > most_stages or not (tried is None or pipeline in tried):
                continue
            of_ranks = expert_sizes(training, data), context_sizes(training, data, choices)
            for micro_batch_size, expert, context in product(divisors(parallel.global_batch_size), *of_ranks):
                count, taking = parallel.global_batch_size // micro_batch_size, data // context
                if (count % taking > 0) != uneven or taking > (min(count, MOST_REPLICAS) if uneven else count):
                    continue
                sized = replace(
                    parallel,
                    tensor=tensor,
                    data=data,
                    pipeline=pipeline,
                    expert=expert,
                    context=context,
                    micro_batch_size=micro_batch_size,
                    shares=Shares.even(count, data).numbers if uneven else None,
                    partition=None,
                    node_order=None,
                )
                if sized.micro_batches <= most and (choices is None or choices.tries(sized)):
                    yield replace(training, parallel=sized)


def tensor_sizes(training: Training, kinds: Sequence[NodeKind]) -> list[int]:
    """Those that fit the model and the nodes, and that every profile of the model has."""
    model = training.model
    measured = [measured_tensor_sizes(kind.gpu, kind.profile, training) for kind in kinds]
    return [
        tensor
        for tensor in divisors(min(kind.gpus for kind in kinds))
        if (model.measured or model.heads % tensor == 0)
        and (tensor == 1 or training.engine.options.get(LATENT) is not True)
        and all(kind.gpus % tensor == 0 for kind in kinds)
        and all(known is None or tensor in known for known in measured)
    ]


def expert_sizes(training: Training, data: int) -> Sequence[int]:
    """How many of so many replicas may share the experts out."""
    return divisors(math.gcd(data, experts_of(training.model) or 1))


def context_sizes(training: Training, ranks: int, choices: Choices | None) -> Sequence[int]:
    """How many of so many ranks with the same weights may share sequences: none where each had fewer than `LONG`
    tokens, unless that is asked for."""
    length, given = training.model.sequence_length, choices is not None and choices.context is not None
    if not training.equal_only or not training.model.traits.megatron_lm:
        return [1]
    return [
        size
        for size in divisors(ranks)
        if size == 1 or (length % (2 * size) == 0 and (given or length // size >= LONG))
    ]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """In increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*sorted({*small, *(number // d for d in small)}),)


def _shares_sequence(training: Training) -> bool:
    """Whether the sequence can be shared as a plan says; tensor groups with experts have to."""
    parallel = training.parallel
    if experts_of(training.model) is not None and parallel.tensor_size > 1 and not parallel.sequence_parallel:
        return False
    sharing = parallel.tensor_size * parallel.context
    return not parallel.sequence_parallel or training.model.sequence_length % sharing == 0


def fitting(
    options: Sequence[Training], nodes: Nodes, lines_of: Callable[[Training, Nodes], Pipelines] = by_replica
) -> Candidates | None:
    """A plan with each option, in those orders in which it fits into memory; without what an earlier option is never
    worse than, and without twins. None if there is nothing left.
    """
    lines: list[Pipelines] = []
    columns: list[Integers] = []
    found: list[Pipelines] = []
    for one in options:
        line = lines_of(one, nodes)
        useful = feasible(line, one.blocks.layers)
        for earlier in lines if useful.any() else ():
            useful &= ~never_worse(earlier, line, one.blocks.layers)
        lines.append(line)
        columns.append(some := np.nonzero(useful)[0])
        if len(some):
            useful_ones = line.take(some)
            first = distinct(useful_ones)
            columns[-1] = some[first]
            found.append(useful_ones.take(first))
    if not any(map(len, columns)):
        return None
    return Candidates(
        options=options,
        kinds=nodes.kinds,
        option=np.repeat(np.arange(len(options)), [*map(len, columns)]),
        orders=nodes.orders[np.concatenate(columns)],
        pipelines=joined(found),
    )
