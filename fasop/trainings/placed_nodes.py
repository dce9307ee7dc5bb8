"""Nodes of a cluster with the plan of an experiment, by the same predictions as a search's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conf.errors import ConfigError
from conf.schema.elastic import Elastic
from conf.schema.experiment import Experiment
from conf.schema.parallel import Parallel
from conf.schema.partition import NodeOrder, Shares
from fasop.costs.hardware import NodeKind
from fasop.costs.training import PlacedTraining
from fasop.errors import SearchError
from fasop.search.micro_batch_memory import that_fit, that_fit_on
from fasop.simulation.predict import planned
from fasop.simulation.ranks.replicas import Replicas
from fasop.simulation.ranks.shares import Replica, best_shares, replicas_of
from fasop.trainings.node_set import NodeSet, total
from megatron_ext.contract.adaptive.shares import Times


class PlacedNodes:
    """Replicas on their nodes."""

    def __init__(
        self,
        placed: PlacedTraining,
        weights: Sequence[int] | None = None,
        sizes: list[list[int]] | None = None,
    ) -> None:
        """`weights` are the micro-batches of each replica in its first batch; None: those that take least. `sizes` are
        those that its micro-batches may have; None: the plan's alone.

        Raises:
            SearchError: a profile has no costs for the tensor size.
        """
        parallel = placed.training.parallel
        self.sizes = sizes
        self._replicas = _replicas(placed)
        self._of_size = {parallel.micro_batch_size: self._replicas}
        for size in {size for of_replica in sizes or () for size in of_replica} - self._of_size.keys():
            self._of_size[size] = _replicas(placed.sized(size))
        self._alike: dict[Replica, list[int]] = {}
        for place, replica in enumerate(self._replicas):
            self._alike.setdefault(replica, []).append(place)
        self._pipeline = parallel.pipeline
        self._full = 4 * parallel.pipeline
        """Micro-batches with which a pipeline is full: another one takes what its slowest stage takes."""
        self._known: dict[tuple[int, ...], float] = {}
        self._timed: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        """By the sizes of micro-batches."""
        count = parallel.global_batch_size // parallel.micro_batch_size
        self.weights = tuple(weights or best_shares(self._replicas, count).counts)

    def seconds(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> float:
        if sizes:
            return max(of.seconds(share) for of, share in zip(self._sized(sizes), shares, strict=True))
        if shares not in self._known:
            self._known[shares] = max(
                [kind.seconds(max([shares[place] for place in places])) for kind, places in self._alike.items()]
            )
        return self._known[shares]

    def times(self, shares: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Times:
        """As a run measures them; in pipelines `fixed_s` also has what an iteration takes all replicas alike."""
        each, beside = self._measured(sizes)
        return Times(each, self.seconds(shares, sizes), beside if self._pipeline > 1 else ())

    def _sized(self, sizes: tuple[int, ...]) -> list[Replica]:
        return [self._of_size[size][place] for place, size in enumerate(sizes)] or self._replicas

    def _measured(self, sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """By replica, the seconds of a micro-batch and those beside them."""
        if sizes not in self._timed:
            replicas, full = self._sized(sizes), self._full
            known = {kind: (kind.seconds(full), kind.seconds(full + 1)) for kind in dict.fromkeys(replicas)}
            each = [known[replica][1] - known[replica][0] for replica in replicas]
            beside = [known[replica][0] - full * one for replica, one in zip(replicas, each, strict=True)]
            self._timed[sizes] = each, beside
        return self._timed[sizes]


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
        weights: Sequence[int] | None = None
        if order == own:
            parallel, weights = placed.training.parallel, experiment.parallel.micro_batches_of
        else:
            try:
                parallel = _on(experiment.parallel, order, nodes)
                replace(experiment, parallel=parallel)  # keeps all rules
            except ConfigError as error:
                refused[str(order)] = str(error)
                continue
        there = replace(placed, training=replace(placed.training, parallel=parallel), nodes=nodes)
        found.append(
            NodeSet(
                name=str(order),
                gpus=sum(node.gpus for node in nodes),
                price_per_hour=total([node.group.price_per_hour for node in nodes]),
                nodes=PlacedNodes(there, weights, _sizes(experiment, there, order == own)),
            )
        )
    return found, refused


def _sizes(experiment: Experiment, there: PlacedTraining, own: bool) -> list[list[int]] | None:
    """By replica, those that its micro-batches may have, as far as they fit.

    Raises:
        SearchError: one fits no replica of the experiment's own nodes.
    """
    wanted = sorted({*experiment.adapt.micro_batch_sizes})
    if not wanted:
        return None
    ranks = [node.gpus for node in there.nodes]
    found = that_fit(experiment, wanted, []) if own else that_fit_on(there, ranks, wanted, [])
    return [[*of_replica] for of_replica in found]


def _replicas(placed: PlacedTraining) -> list[Replica]:
    return replicas_of(placed.training.parallel, Replicas(placed).of(placed.partition.layers))


def _on(parallel: Parallel, order: NodeOrder, nodes: Sequence[NodeKind]) -> Parallel:
    """The plan on other nodes.

    Raises:
        ConfigError: it does not fit them.
    """
    gpus, of_replica = sum(node.gpus for node in nodes), parallel.tensor_size * parallel.pipeline
    count = parallel.global_batch_size // parallel.micro_batch_size
    data = gpus // of_replica
    if gpus % of_replica:
        raise ConfigError(f"{gpus} GPUs are no whole number of replicas of {of_replica}")
    if count < data:
        raise ConfigError(
            f"parallel.global_batch_size={parallel.global_batch_size} has {count} micro-batches, too few for {data} "
            "replicas"
        )
    shares = None if count % data == 0 else str(Shares.even(count, data))
    sizes = {"tensor": parallel.tensor_size, "data": data, "replicas": None, "shares": shares, "node_order": str(order)}
    return replace(parallel, **sizes)  # type: ignore[arg-type]


def _check(experiment: Experiment) -> None:
    parallel = experiment.parallel
    if parallel.schedule_file is not None:
        raise SearchError(
            f"parallel.schedule_file={parallel.schedule_file} is for one number of micro-batches; use "
            "parallel.schedule_file=null"
        )
    if experiment.adapt.streams:
        raise SearchError(
            f"adapt.streams={experiment.adapt.streams}: a simulation plays plans whose streams stay; leave it out"
        )
    if parallel.stream is not None or not parallel.alike:
        what = f"parallel.schedule={parallel.schedule}" if parallel.stream is not None else f"{parallel.sizes}"
        raise SearchError(
            f"{what}: a simulation plays plans that flush, with replicas and tensor groups of one size on each stage; "
            "'tdpp search' predicts an iteration of others"
        )
