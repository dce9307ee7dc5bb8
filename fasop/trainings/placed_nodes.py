"""Nodes of a cluster with the plan of an experiment, by the same predictions as a search's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from conf.errors import ConfigError
from conf.schema.elastic import Elastic
from conf.schema.experiment import Experiment
from conf.schema.parallel import AUTO, Parallel
from conf.schema.partition import NodeOrder, Shares, in_runs
from fasop.costs.hardware import NodeKind
from fasop.costs.stream_rates import NO_GAIN, stream_rates
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.batch_division import best_counts, provisional
from fasop.search.micro_batch_memory import that_fit, that_fit_on
from fasop.simulation.predict import planned
from fasop.simulation.ranks.replicas import Replicas
from fasop.trainings.node_set import NodeSet, total
from fasop.trainings.replica_times import OneStage, ReplicaTimes, SeveralStages, Taken, halves_of
from megatron_ext.contract.adaptive.shares import Times
from megatron_ext.contract.schedule.deal import Division


class PlacedNodes:
    """Replicas on their nodes."""

    def __init__(
        self,
        placed: PlacedTraining,
        weights: Sequence[int],
        ways: Sequence[Mapping[int, Sequence[int]]] | None = None,
    ) -> None:
        """`weights` are the micro-batches of each replica in its first batch. `ways` are the sizes that its
        micro-batches may have, each with its numbers of streams; None: what the plan says alone.

        Raises:
            SearchError: a profile has no costs for the tensor size.
        """
        parallel = placed.training.parallel
        self.weights, self.ways, self.streams = weights, ways, parallel.streams_of
        self.pipelined = parallel.pipeline > 1
        self._placed = placed
        self._of_size: dict[tuple[int, bool], list[ReplicaTimes]] = {}
        """By the size of micro-batches, and whether any replica has several streams."""
        self._known: dict[tuple[Division, bool], float] = {}
        self._timed: dict[tuple[Division, int, bool], Times] = {}

    def seconds(self, division: Division, measures: bool = False) -> float:
        key = division, measures
        if key not in self._known:
            self._known[key] = max(taken.whole for taken in self._taken(division, measures))
        return self._known[key]

    def times(self, division: Division, iterations: int, measures: bool) -> Times:
        """As the stopwatches of a run's ranks show them: medians over the iterations."""
        key = division, min(iterations, 3), measures
        if key not in self._timed:
            self._timed[key] = self._times(*key)
        return self._timed[key]

    def _times(self, division: Division, iterations: int, measures: bool) -> Times:
        every = self._taken(division, False)
        whole = self.seconds(division)
        if measures and iterations < 3:  # of three or more, one that measures is the longest
            measured, part = self._taken(division, True), 1.0 / iterations
            every = [_between(*both, part) for both in zip(every, measured, strict=True)]
            whole += part * (self.seconds(division, measures=True) - whole)
        work = [max(taken.work) for taken in every]
        passes = [max(taken.passes) for taken in every]
        return Times(
            [seconds / count for seconds, count in zip(work, division.shares, strict=True)],
            whole,
            [both - own for both, own in zip(passes, work, strict=True)] if self.pipelined else (),
        )

    def _taken(self, division: Division, measures: bool) -> list[Taken]:
        """By replica."""
        in_streams = bool(division.streams)
        replicas = [self._replicas(size, in_streams)[place] for place, size in enumerate(division.sizes)]
        halves = [(count, 0) for count in division.shares]
        if measures and (self.pipelined or in_streams):  # else it does not matter which micro-batches are even
            halves = halves_of(division.shares)
        again = tuple(map(max, zip(*{replica.gradients for replica in replicas}, strict=True)))
        known: dict[tuple[ReplicaTimes, int, int, int], Taken] = {}
        found = []
        for replica, (even, odd), streams in zip(replicas, halves, division.copies, strict=True):
            key = replica, even, odd, streams
            if key not in known:
                known[key] = replica.measuring(*key[1:], again) if measures else replica.iteration(even + odd, streams)
            found.append(known[key])
        return found

    def _replicas(self, size: int, in_streams: bool) -> list[ReplicaTimes]:
        key = size, in_streams
        if key not in self._of_size:
            self._of_size[key] = _replicas(self._placed.sized(size), in_streams)
        return self._of_size[key]


def node_sets(experiment: Experiment, orders: Sequence[NodeOrder]) -> tuple[list[NodeSet], dict[str, str]]:
    """Those of the orders that can train the experiment, and of each other one why not.

    On the experiment's own nodes its plan is as it is. On others the tensor and pipeline sizes, the micro-batch and
    the global batch stay; as many replicas are there as find room, with the shares that take least.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for the tensor size, or the plan is of no kind that can be played.
    """
    _check(experiment)
    experiment = replace(experiment, elastic=Elastic())  # its rules are for the nodes that it is launched on
    placed, own = planned(experiment), experiment.node_order
    kinds = {kind.name: kind for kind in placed.kinds}
    found, refused = list[NodeSet](), dict[str, str]()
    for order in orders:
        nodes = [kinds[name] for name in order.groups]
        there, weights = replace(placed, nodes=nodes), experiment.parallel.micro_batches_of
        if order != own:
            try:
                there, weights = _elsewhere(experiment, there, order)
            except ConfigError as error:
                refused[str(order)] = str(error)
                continue
        found.append(
            NodeSet(
                name=str(order),
                gpus=sum(node.gpus for node in nodes),
                price_per_hour=total([node.group.price_per_hour for node in nodes]),
                nodes=PlacedNodes(there, weights, _ways(experiment, there, order == own)),
            )
        )
    return found, refused


def _ways(experiment: Experiment, there: PlacedTraining, own: bool) -> list[dict[int, list[int]]] | None:
    """By replica, the sizes that its micro-batches may have, and the numbers of streams with each, as far as they fit.

    Raises:
        SearchError: one fits no replica of the experiment's own nodes.
    """
    sizes, streams = sorted({*experiment.adapt.micro_batch_sizes}), sorted({*experiment.adapt.streams})
    if not sizes and not streams:
        return None
    if own:
        return that_fit(experiment, sizes, streams)
    return that_fit_on(there, [node.gpus for node in there.nodes], sizes, streams)


def _replicas(placed: PlacedTraining, in_streams: bool) -> list[ReplicaTimes]:
    """Those that take the same share an object."""
    training, layers = placed.training, placed.partition.layers
    parallel = training.parallel
    placed = replace(placed, training=replace(training, in_streams=in_streams))
    replicas = Replicas(placed)
    rates = {
        kind.name: stream_rates(kind.profile, training.model, training.precision, parallel.micro_batch_size)
        for kind in (placed.kinds if in_streams else ())
    }
    known: dict[tuple[int, str], ReplicaTimes] = {}
    found = []
    for durations, (kind, *_) in zip(replicas.of(layers), replicas.kinds, strict=True):
        key = id(durations), kind if in_streams else ""
        if key not in known:
            one_stage = parallel.pipeline == 1 and parallel.chunks == 1
            known[key] = (
                OneStage(durations, rates.get(kind, NO_GAIN))
                if one_stage
                else SeveralStages(str(parallel.schedule), parallel.chunks, durations)
            )
        found.append(known[key])
    return found


def _between(plain: Taken, measured: Taken, part: float) -> Taken:
    """The median of both, or of one that measures alone."""

    def of(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
        return tuple(a + part * (b - a) for a, b in zip(first, second, strict=True))

    (whole,) = of((plain.whole,), (measured.whole,))
    return Taken(whole, of(plain.work, measured.work), of(plain.passes, measured.passes))


def _elsewhere(
    experiment: Experiment, placed: PlacedTraining, order: NodeOrder
) -> tuple[PlacedTraining, tuple[int, ...]]:
    """The plan on other nodes than its own, with as many replicas as find room; and the micro-batches of each, which
    take least.

    Raises:
        ConfigError: it does not fit them.
    """
    parallel = _on(experiment.parallel, order, placed.nodes)
    replace(experiment, parallel=parallel)  # keeps all rules
    streams = _streams_on(experiment, placed.nodes)
    if max(streams) > 1:
        parallel = _shared(replace(parallel, shares=AUTO, streams=in_runs(streams, "-")))
    training = replace(placed.training, parallel=parallel, in_streams=max(streams) > 1)
    counts = best_counts(replace(placed, training=training))
    assert counts is not None, "the shares of the plan are one way"
    if max(streams) > 1:
        common = gcd(*counts)
        parallel = replace(parallel, shares=str(Shares(tuple(count // common for count in counts))))
    replace(experiment, parallel=parallel)
    return replace(placed, training=replace(training, parallel=parallel)), counts


def _shared(parallel: Parallel) -> Parallel:
    """With shares that its streams divide.

    Raises:
        ConfigError: there are none.
    """
    for values in provisional(parallel):
        return replace(parallel, **values)  # type: ignore[arg-type]
    count = parallel.global_batch_size // parallel.micro_batch_size
    raise ConfigError(
        f"parallel.global_batch_size={parallel.global_batch_size} has {count} micro-batches, which cannot be shared so "
        f"that {parallel.streams} streams divide those of each replica"
    )


def _streams_on(experiment: Experiment, nodes: Sequence[NodeKind]) -> tuple[int, ...]:
    """By replica: those that the replicas of each group have on the experiment's own nodes.

    Raises:
        ConfigError: these have several numbers.
    """
    parallel = experiment.parallel
    if max(parallel.streams_of) == 1:
        return (1,)
    of_group: dict[str, set[int]] = {}
    each = iter(parallel.streams_of)
    for name, ranks in zip(experiment.node_order.groups, experiment.ranks_per_node(), strict=True):
        of_group.setdefault(name, set()).update(next(each) for _ in range(ranks))
    if several := [name for name, counts in of_group.items() if len(counts) > 1]:
        counts = " and ".join(map(str, sorted(of_group[several[0]])))
        raise ConfigError(
            f"parallel.streams={parallel.streams} gives the replicas of group {several[0]!r} {counts} streams; other "
            "nodes can be simulated where all replicas of a group have the same number"
        )
    return tuple(next(iter(of_group[node.name])) for node in nodes for _ in range(node.gpus))


def _on(parallel: Parallel, order: NodeOrder, nodes: Sequence[NodeKind]) -> Parallel:
    """The plan on other nodes.

    Raises:
        ConfigError: it does not fit them.
    """
    gpus, of_replica = sum(node.gpus for node in nodes), parallel.tensor_size * parallel.pipeline
    count = parallel.global_batch_size // parallel.micro_batch_size
    data = gpus // of_replica
    if gpus % of_replica:
        raise ConfigError(f"{gpus} GPUs are not a whole number of replicas of {of_replica} GPUs")
    if count < data:
        raise ConfigError(
            f"parallel.global_batch_size={parallel.global_batch_size} has {count} micro-batches, too few for {data} "
            "replicas"
        )
    shares = None if count % data == 0 else str(Shares.even(count, data))
    sizes = {"tensor": parallel.tensor_size, "data": data, "replicas": None, "shares": shares, "node_order": str(order)}
    return replace(parallel, **sizes, streams=None)  # type: ignore[arg-type]


def _check(experiment: Experiment) -> None:
    parallel = experiment.parallel
    if parallel.schedule_file is not None:
        raise SearchError(
            f"parallel.schedule_file={parallel.schedule_file} is for a fixed number of micro-batches; use "
            f"parallel.schedule_file=null"
        )
    if parallel.stream is not None or not parallel.alike:
        what = f"parallel.schedule={parallel.schedule}" if parallel.stream is not None else f"{parallel.sizes}"
        raise SearchError(
            f"{what}: a simulation needs a plan with a flush and the same replicas and tensor size on each stage; "
            f"'tdpp search' predicts an iteration of other plans"
        )
