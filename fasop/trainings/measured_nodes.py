"""Nodes of a cluster whose GPUs have imported profiles: a replica is a GPU, and its times are those of IIDP's
performance model (`fasop.shares.of_profiles`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from conf.errors import ConfigError
from conf.visible import plural
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.profiles.files import read_profile
from fasop.errors import SearchError
from fasop.search.shares.micro_batch_memory import that_fit
from fasop.shares.of_profiles import SYNC, measured_cluster, solved
from fasop.shares.performance import Pace, all_reduces, in_rounds, paces
from fasop.shares.public_files import Cluster
from fasop.trainings.play import Nodes
from fasop.trainings.replica_nodes import ReplicaNodes, Taken

if TYPE_CHECKING:
    from conf.schema.experiment import Experiment

IMPORTED = "times are those of IIDP's performance model, from imported profiles"


class WholeSteps:
    """A GPU of which whole steps were measured."""

    def __init__(self, by_workers: Sequence[Pace], sum_s: float) -> None:
        """`sum_s` are the seconds of an all-reduce of all gradients, with nothing beside it."""
        self._by_workers = by_workers
        self.gradients = (sum_s,)

    def iteration(self, count: int, streams: int) -> Taken:
        return self._taken(streams, 0.0, count)

    def measuring(self, even: int, odd: int, streams: int, again: tuple[float, ...]) -> Taken:
        return self._taken(streams, again[0], even, odd)

    def _taken(self, streams: int, again: float, *halves: int) -> Taken:
        whole, passes = in_rounds(self._by_workers, streams, *halves)
        return Taken(whole + again, (passes,), (passes,))


class Measured:
    """Nodes whose times were measured by IIDP or JABAS."""

    def __init__(self, experiment: Experiment, whole: Cluster) -> None:
        """Raises SearchError where nothing was measured of the plan's micro-batches or streams."""
        groups = experiment.cluster.groups
        counts = dict(zip(experiment.node_order.groups, experiment.ranks_per_node(), strict=True))
        used = {name: replace(groups[name], gpus_per_node=gpus) for name, gpus in counts.items()}
        self.kinds: Sequence[NodeKind] = node_kinds(replace(experiment.cluster, groups=used, links={}, topology={}))
        self.notes = [IMPORTED]
        self._read = cache(read_profile)
        _check(experiment, whole)

    @classmethod
    def of(cls, experiment: Experiment) -> Measured | None:
        """None unless profiles have whole steps of the model alone, and each replica is one GPU.

        Raises:
            ConfigError: a profile cannot be read.
            SearchError: nothing was measured of the plan's micro-batches or streams.
        """
        if experiment.parallel.world_size != experiment.parallel.layout.replicas[0]:
            return None
        whole = measured_cluster(experiment, in_streams=True)
        return None if whole is None else cls(experiment, whole)

    def best_counts(self, there: Experiment, nodes: Sequence[NodeKind]) -> tuple[int, ...]:
        """The micro-batches of each replica, in the streams of the plan, with which an iteration takes least. Raises
        ConfigError: the batch cannot be divided so."""
        parallel, cluster = there.parallel, self._cluster(there)
        streams = parallel.streams_of if max(parallel.streams_of) > 1 else None
        try:
            return solved(
                cluster, parallel.global_batch_size, parallel.micro_batch_size, None, streams_of=streams
            ).counts
        except SearchError as error:
            raise ConfigError(str(error)) from error

    def nodes(self, there: Experiment, nodes: Sequence[NodeKind], weights: Sequence[int], own: bool) -> Nodes:
        """What they do with a batch. Raises SearchError: nothing was measured of a micro-batch size or a number of
        streams."""
        cluster = self._cluster(there)
        return ReplicaNodes(
            lambda size, _: _replicas(cluster, size), weights, there.parallel.streams_of, _ways(there, cluster, own)
        )

    def _cluster(self, there: Experiment) -> Cluster:
        cluster = measured_cluster(there, in_streams=True, read=self._read)
        assert cluster is not None, "some of the GPUs that were measured"
        return cluster


def _replicas(cluster: Cluster, size: int) -> list[WholeSteps]:
    """GPUs that take the same share an object."""
    known: dict[tuple[Pace, ...], WholeSteps] = {}
    found = []
    for server in cluster.servers:
        by_workers = tuple(paces(cluster, server, size, SYNC))
        replica = known.setdefault(by_workers, WholeSteps(by_workers, sum(all_reduces(cluster, server))))
        found += [replica] * server.gpus
    return found


def _most_streams(cluster: Cluster, size: int) -> list[int]:
    """Return the most streams of each replica that were measured."""
    gpus = cluster.measured[size]
    return [gpus[server.measured_as].most_workers for server in cluster.servers for _ in range(server.gpus)]


def _check(experiment: Experiment, cluster: Cluster) -> None:
    parallel = experiment.parallel
    size, sizes = parallel.micro_batch_size, ", ".join(map(str, cluster.measured))
    estimate = "cluster.gpus.<key>.profile=null estimates the times instead"
    if size not in cluster.measured:
        raise SearchError(
            f"parallel.micro_batch_size={size} was not measured on all GPUs by their imported profiles; use one of "
            f"{sizes}, or {estimate}"
        )
    for replica, (streams, most) in enumerate(zip(parallel.streams_of, _most_streams(cluster, size), strict=True)):
        if streams > most:
            raise SearchError(
                f"parallel.streams={parallel.streams}: the GPU of replica {replica} was measured with up to "
                f"{plural(most, 'worker')} and micro-batches of {size}; use at most that many streams there, or "
                f"{estimate}"
            )
    if strange := [one for one in experiment.adapt.micro_batch_sizes if one not in cluster.measured]:
        raise SearchError(
            f"adapt.micro_batch_sizes={[*experiment.adapt.micro_batch_sizes]}: micro-batches of {strange[0]} were not "
            f"measured on all GPUs by their imported profiles, only {sizes}; leave {strange[0]} out, or {estimate}"
        )


def _ways(experiment: Experiment, cluster: Cluster, own: bool) -> list[dict[int, list[int]]] | None:
    """List for each replica the sizes that its micro-batches may have, and the numbers of streams with each: those
    measured."""
    adapt, parallel = experiment.adapt, experiment.parallel
    sizes, streams = sorted({*adapt.micro_batch_sizes}), sorted({*adapt.streams})
    if not sizes and not streams:
        return None
    if own:
        that_fit(experiment, sizes, streams)  # says what fits no replica
    every = sorted({parallel.micro_batch_size, *sizes})
    most = {size: _most_streams(cluster, size) for size in every}
    found = []
    for replica, given in enumerate(parallel.streams_of):
        ways = {size: [one for one in sorted({given, *streams}) if one <= most[size][replica]] for size in every}
        found.append({size: counts for size, counts in ways.items() if counts})
    return found
