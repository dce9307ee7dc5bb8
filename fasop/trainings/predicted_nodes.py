"""Nodes of a cluster with the plan of an experiment, by the same predictions as a search's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conf.schema.experiment import Experiment
from conf.schema.parallel import Parallel
from fasop.costs.hardware import NodeKind
from fasop.costs.profiles.doubts import doubts
from fasop.costs.stream_rates import NO_GAIN, stream_rates
from fasop.costs.training import PlacedTraining
from fasop.search.shares.batch_division import best_counts
from fasop.search.shares.micro_batch_memory import that_fit, that_fit_on
from fasop.simulation.predict import planned
from fasop.simulation.ranks.rank_durations import basis
from fasop.simulation.ranks.replicas import Replicas
from fasop.trainings.play import Nodes
from fasop.trainings.replica_nodes import ReplicaNodes
from fasop.trainings.replica_times import OneStage, ReplicaTimes, SeveralStages


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
        """What they do with a batch.

        Raises:
            SearchError: a micro-batch size or a number of streams fits no replica of the experiment's own nodes.
        """
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
            training = replace(training, parallel=parallel, in_streams=max(parallel.streams_of) > 1)
        return replace(self._placed, nodes=nodes, training=training)


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
