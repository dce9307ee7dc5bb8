"""The links that a plan's ranks have where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.heterogeneous_placement import HeterogeneousPlacement
from fasop.costs.network.link_table import LinkTable
from fasop.costs.network.links import Link
from fasop.costs.network.pair_placement import PairUses, place_pairs
from fasop.costs.network.placement import Placement, Uses
from fasop.costs.profiles.collective_times import Operation
from fasop.costs.training import Training
from megatron_ext.contract.plan import BUCKET_BYTES


class Messages(NamedTuple):
    """Bytes of single messages, by which links are looked up whose bandwidth depends on them."""

    shortest: int
    """Across a cut."""
    longest: int
    sums: float
    """A step of a ring that sums gradients: a replica's share of a bucket, or of the mean stage's gradients where these
    are less, or are all summed at once."""
    embedding: float
    """A step that sums those of the embedding."""
    weights: float
    """Of the mean stage, which a sharded optimizer hands out."""

    @classmethod
    def of(cls, training: Training) -> Messages:
        parallel, blocks = training.parallel, training.blocks
        of_layer = sizes.kind_parameters(training.model, parallel.tensor_size, own_word=parallel.pipeline > 1)
        whole = training.reduced_bytes * float(np.dot(of_layer, blocks.counts[:, -1])) / parallel.pipeline
        bucket = BUCKET_BYTES * training.reduced_bytes / training.gradient_bytes
        shared, holders = sizes.shared_parameters(training.model, parallel.tensor_size)
        return cls(
            shortest=min(training.messages),
            longest=max(training.messages),
            sums=(whole if training.megatron_lm else min(whole, bucket)) / parallel.data,
            embedding=training.gradient_bytes * shared / min(holders, parallel.pipeline),
            weights=whole / training.reduced_bytes * training.width,
        )


class Hops(NamedTuple):
    """From each stage to the next one, or back: [stages, pipelines]."""

    link: Link[Floats]
    """For the shortest message."""
    longer: Floats
    """Seconds for each byte that a message is longer."""


@dataclass(frozen=True, kw_only=True)
class PlacedLinks:
    """Where ranks lie, and the links that they have there: [items, pipelines] each."""

    stages: Uses
    hops: Hops
    back: Hops | None
    """None: as there."""
    one_way_out: NDArray[np.bool_]
    """[stages]"""
    sums: Link[Floats]
    """Links of a ring of all replicas, or of a ring that takes as long as sums within nodes first."""
    embedding: Link[Floats]
    gathering: Link[Floats] | None = None
    """Likewise where replicas hand out weights; None: the links of `sums`."""
    by_node: NDArray[np.bool_] | None = None
    """[stages, pipelines]: whether sums within nodes first are no slower; None: they are not asked for."""

    @property
    def handing(self) -> Link[Floats]:
        """Return the links by which replicas hand out weights."""
        return self.sums if self.gathering is None else self.gathering

    def with_sums_by_node(
        self, within: Link[Floats], across: Link[Floats], where: Placement, replicas: int, *, least: bool
    ) -> PlacedLinks:
        """Returns these links with sums within nodes first, wherever that is no slower; with `least`, with the better
        latency and the better rate of both ways.

        Of n ranks on each of m nodes a step within takes (n - 1) / n of the bytes, one across (m - 1) / m of an n-th,
        while n rings share the link that one has else (megatron_ext/parallel/summing.py).
        """
        nodes, ranks = where.spread.T[..., np.newaxis]
        steps = replicas - 1
        latency = ((ranks - 1) * within.latency_s + (nodes - 1) * across.latency_s) / steps
        rate = (ranks - 1) / ranks * within.s_per_byte + (nodes - 1) / nodes * across.s_per_byte
        rate = rate * replicas / steps
        even = nodes * ranks == replicas
        better = even & (latency <= self.sums.latency_s) & (rate <= self.sums.s_per_byte)
        if least:
            latency, rate = np.minimum(latency, self.sums.latency_s), np.minimum(rate, self.sums.s_per_byte)
        taken = np.broadcast_to(even, better.shape) if least else better
        sums = Link(
            latency_s=np.where(taken, latency, self.sums.latency_s),
            s_per_byte=np.where(taken, rate, self.sums.s_per_byte),
        )
        return replace(self, sums=sums, by_node=better)


def on_pairs(
    kinds: Sequence[NodeKind],
    orders: Integers,
    training: Training,
    where: Placement | HeterogeneousPlacement,
    *,
    least: bool = False,
) -> PlacedLinks:
    """Work out the links by pairs of kinds; with `least`, those of nodes of one kind by themselves, what no link of
    theirs goes below."""
    parallel, messages = training.parallel, Messages.of(training)
    if isinstance(where, HeterogeneousPlacement):
        pairs = where.pairs
    else:
        gpus = tuple(kinds[kind].gpus for kind in orders[0])
        pairs = place_pairs(gpus, parallel.tensor_size, parallel.data, parallel.pipeline)

    def table(term: str, size: float, exchange: Exchange) -> LinkTable:
        found = LinkTable.of(kinds, [getattr(kind.factors, term) for kind in kinds], max(1.0, size), exchange)
        return found.least() if least else found

    short, long = (
        table("messages", size, Exchange(Operation.send_recv, 2, size))
        for size in (messages.shortest, messages.longest)
    )
    bytes_longer = messages.longest - messages.shortest

    def hops(uses: PairUses) -> Hops:
        link = short.slowest(uses, orders)
        if not bytes_longer:
            return Hops(link, link.s_per_byte)
        most = messages.longest * long.slowest(uses, orders).s_per_byte
        return Hops(link, (most - messages.shortest * link.s_per_byte) / bytes_longer)

    replicas, tensor = parallel.data, parallel.tensor_size
    scattered = Operation.reduce_scatter if parallel.sharded_optimizer else Operation.all_reduce
    exchange = Exchange(scattered, replicas, messages.sums * replicas, tensor)
    of_sums = table("gradients", messages.sums, exchange)
    gathering = None
    if parallel.sharded_optimizer and any(kind.collectives is not None for kind in kinds):
        handed_out = Exchange(Operation.all_gather, replicas, messages.weights, tensor)
        gathering = table("gradients", messages.sums, handed_out).slowest(pairs.sums, orders)
    holders = min(sizes.shared_parameters(training.model, tensor)[1], parallel.pipeline)
    tied = Exchange(Operation.all_reduce, holders, messages.embedding * holders, tensor * replicas)
    placed = PlacedLinks(
        stages=where.stages,
        hops=hops(pairs.hops),
        back=hops(pairs.hops.back) if short.one_way or long.one_way else None,
        one_way_out=where.one_way_out,
        sums=of_sums.slowest(pairs.sums, orders),
        embedding=table("embedding", messages.embedding, tied).slowest(pairs.embedding, orders),
        gathering=gathering,
    )
    if not training.reduces_by_node or isinstance(where, HeterogeneousPlacement) or parallel.data == 1:
        return placed
    nodes, each = (int(most) for most in where.spread.max(axis=0))
    here = exchange._replace(ranks=each)
    there = Exchange(scattered, nodes, exchange.bytes / each, tensor * each)
    within, across = (
        table("gradients", messages.sums, one).slowest(pairs.sums, orders, inside=inside)
        for one, inside in ((here, True), (there, False))
    )
    return replace(placed, gathering=None).with_sums_by_node(within, across, where, parallel.data, least=least)
