"""The plan of an experiment on the nodes of its cluster, and on fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.schema.parallel import Parallel
from conf.schema.values.partition import AUTO, NodeOrder, Shares, run_length_text
from conf.visible import plural
from fasop.costs.hardware import NodeKind
from fasop.costs.parallelism import Parallelism
from fasop.costs.profiles.doubts import doubts
from fasop.costs.stream_rates import NO_GAIN, stream_rates
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.shares.batch_division import best_counts, provisional
from fasop.search.shares.micro_batch_memory import that_fit, that_fit_on
from fasop.simulation.predict import planned
from fasop.simulation.ranks.rank_durations import basis
from fasop.simulation.ranks.replicas import Replicas
from fasop.trainings.measured_nodes import Measured
from fasop.trainings.play import Nodes
from fasop.trainings.played import NodeSet, total
from fasop.trainings.replica_nodes import OneStage, ReplicaNodes, ReplicaTimes, SeveralStages

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment


class Predicted:
    """Nodes whose times are predicted."""

    def __init__(self, experiment: Experiment) -> None:
        """Raises:
        ConfigError: a profile cannot be read.
        SearchError: the model is a module that no profile knows.
        """
        self._placed = planned(experiment)
        self.kinds: Sequence[NodeKind] = self._placed.kinds

    @property
    def notes(self) -> list[str]:
        """What is hard to believe of the times, or is not a measurement."""
        kinds = sorted(self.kinds, key=lambda kind: kind.name)
        return [*doubts(self._placed.training, kinds, {basis(self._placed)})]

    def best_counts(self, there: Experiment, nodes: Sequence[NodeKind]) -> tuple[int, ...]:
        """The micro-batches of each replica, in the streams of the plan, with which an iteration takes least."""
        counts = best_counts(self._on(nodes, there.parallel))
        assert counts is not None, "the shares of the plan are one way"
        return counts

    def nodes(self, there: Experiment, nodes: Sequence[NodeKind], weights: Sequence[int], own: bool) -> Nodes:
        """What they do with a batch. Raises SearchError: a micro-batch size or a number of streams fits no replica of
        the experiment's own nodes."""
        placed = self._on(nodes, None if own else there.parallel)
        parallel = placed.training.parallel
        return ReplicaNodes(
            lambda size, in_streams: _replicas(placed.sized(size), in_streams),
            weights,
            parallel.streams_of,
            _ways(there, placed, own),
            pipelined=parallel.pipeline > 1,
        )

    def _on(self, nodes: Sequence[NodeKind], parallel: Parallel | None) -> PlacedTraining:
        """The training there; by its own plan, if that is None."""
        training = self._placed.training
        if parallel is not None:
            training = replace(training, parallel=Parallelism.of(parallel), in_streams=max(parallel.streams_of) > 1)
        return replace(self._placed, nodes=nodes, training=training)


def _ways(experiment: Experiment, there: PlacedTraining, own: bool) -> list[dict[int, list[int]]] | None:
    """List for each replica the sizes that its micro-batches may have, and the numbers of streams with each, as far as
    they fit. Raises SearchError: one fits no replica of the experiment's own nodes."""
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


def times_of(experiment: Experiment) -> Predicted | Measured:
    """From whole steps that IIDP or JABAS measured, if profiles have these alone; otherwise predicted.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: what was measured does not fit the plan, or the model is a module that no profile knows.
    """
    return Measured.of(experiment) or Predicted(experiment)


def node_sets(
    experiment: Experiment, orders: Sequence[NodeOrder], times: Predicted | Measured | None = None
) -> tuple[list[NodeSet], dict[str, str]]:
    """Those of the orders that can train the experiment, and of each other one why not.

    On the experiment's own nodes its plan is as it is. On others the tensor and pipeline sizes, the micro-batch and
    the global batch stay; as many replicas are there as find room, with the shares that take least.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: a profile has no costs for the tensor size, or the plan is of no kind that can be played.
    """
    _check(experiment)
    times = times or times_of(experiment)
    experiment = experiment.on_fixed_nodes()  # its rules are for the nodes that it is launched on
    kinds = {kind.name: kind for kind in times.kinds}
    found, refused = list[NodeSet](), dict[str, str]()
    for order in orders:
        nodes = [kinds[name] for name in order.groups]
        own, there, weights = order == experiment.node_order, experiment, experiment.parallel.micro_batches_of
        if not own:
            try:
                there, weights = _elsewhere(experiment, times, nodes, order)
            except ConfigError as error:
                refused[str(order)] = str(error)
                continue
        found.append(
            NodeSet(
                name=str(order),
                gpus=sum(node.gpus for node in nodes),
                price_per_hour=total([node.group.price_per_hour for node in nodes]),
                nodes=times.nodes(there, nodes, weights, own),
            )
        )
    return found, refused


def _elsewhere(
    experiment: Experiment, times: Predicted | Measured, nodes: Sequence[NodeKind], order: NodeOrder
) -> tuple[Experiment, tuple[int, ...]]:
    """With the plan on other nodes than its own, with as many replicas as find room; and the micro-batches of each,
    which take least. Raises ConfigError: it does not fit them."""
    parallel = _on(experiment.parallel, order, nodes)
    replace(experiment, parallel=parallel)  # keeps all rules
    streams = _streams_on(experiment, nodes)
    if max(streams) > 1:
        parallel = _shared(replace(parallel, shares=AUTO, streams=run_length_text(streams, "-")))
    there = replace(experiment, parallel=parallel)
    counts = times.best_counts(there, nodes)
    if max(streams) > 1:
        common = gcd(*counts)
        shares = str(Shares(tuple(count // common for count in counts)))
        there = replace(experiment, parallel=replace(parallel, shares=shares))
    return there, counts


def _shared(parallel: Parallel) -> Parallel:
    """With shares that its streams divide. Raises ConfigError: there are none."""
    for values in provisional(parallel):
        return replace(parallel, **values)  # type: ignore[arg-type]
    count = parallel.global_batch_size // parallel.micro_batch_size
    raise ConfigError(
        f"parallel.global_batch_size={parallel.global_batch_size} has {plural(count, 'micro-batch', 'es')}, which "
        f"cannot be shared so that {parallel.streams} streams divide those of each replica"
    )


def _streams_on(experiment: Experiment, nodes: Sequence[NodeKind]) -> tuple[int, ...]:
    """Return the streams of each replica: those that the replicas of each group have on the experiment's own nodes.
    Raises ConfigError: these have several numbers."""
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
    """The plan on other nodes. Raises ConfigError: it does not fit them."""
    gpus, of_replica = sum(node.gpus for node in nodes), parallel.tensor_size * parallel.pipeline
    count = parallel.global_batch_size // parallel.micro_batch_size
    data = gpus // of_replica
    if gpus % of_replica:
        raise ConfigError(f"a replica takes {plural(of_replica, 'GPU')}, which does not divide {gpus}")
    if count < data:
        raise ConfigError(
            f"parallel.global_batch_size={parallel.global_batch_size} has {plural(count, 'micro-batch', 'es')}, too "
            f"few for {plural(data, 'replica')}"
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
