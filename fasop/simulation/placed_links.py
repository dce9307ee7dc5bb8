"""The links that a plan's ranks have where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs import sizes
from fasop.costs.arrays import Floats, Integers, rolled
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Exchange
from fasop.costs.network.heterogeneous_placement import HeterogeneousPlacement
from fasop.costs.network.link_table import LinkTable
from fasop.costs.network.links import Link
from fasop.costs.network.placement import PairUses, Placement, Uses, place_pairs
from fasop.costs.profiles.steps import Operation
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import BUCKET_BYTES


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
    """The weights of the mean stage, which a sharded optimizer hands out."""

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


def scattered(whole: Hops, parts: Hops, gather: Link[Floats], training: Training) -> tuple[Hops, NDArray[np.bool_]]:
    """The hops of messages of which each rank of a tensor group sends its part, after which the receiving group gathers
    them by `gather`; and [stages, pipelines] at which cuts that is done: where it is quicker, or at all.

    `parts` are the links for messages of that size. What gathers takes is added to the latency: it occupies no link
    between nodes.
    """
    tensor, shortest = training.parallel.tensor_size, min(training.messages)
    link = Link(
        latency_s=parts.link.latency_s + gather.takes(np.array(float(shortest))),
        s_per_byte=parts.link.s_per_byte / tensor,
    )
    own = Hops(link, parts.longer / tensor + gather.s_per_byte)
    size = np.array(float(shortest))
    better = own.link.takes(size) < whole.link.takes(size)
    if training.parallel.scatter_messages == "true":
        better = np.ones_like(better)
    link = Link(
        latency_s=np.where(better, link.latency_s, whole.link.latency_s),
        s_per_byte=np.where(better, link.s_per_byte, whole.link.s_per_byte),
    )
    return Hops(link, np.where(better, own.longer, whole.longer)), better


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
    scattered: NDArray[np.bool_] | None = None
    """[stages, pipelines]: whether each rank of a tensor group sends a part of a message; None: nowhere."""
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


def gathering_in_groups(kinds: Sequence[NodeKind], orders: Integers, training: Training, stages: Uses) -> Link[Floats]:
    """[stages, pipelines]: the links by which the tensor groups on either side of each cut gather a message, of the
    slower side."""
    tensor = training.parallel.tensor_size
    whole = Exchange(Operation.all_gather, tensor, float(min(training.messages)))
    links = [kind.within(whole).all_gather(tensor) for kind in kinds]
    factors = [kind.factors.messages for kind in kinds]
    times = np.array([[f * one.latency_s, f * one.s_per_byte] for f, one in zip(factors, links, strict=True)])
    slowest = np.maximum.reduceat(times[orders.T[stages.nodes]], stages.starts, axis=0)
    sides: Floats = np.maximum(slowest, rolled(slowest, -1, 0))
    return Link(latency_s=sides[..., 0], s_per_byte=sides[..., 1])


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
        """Those that are known are kept by the first kind, with all of them, so that no others have their ids."""
        key = (term, size, exchange, least, *map(id, kinds))
        if key not in kinds[0].known_links:
            found = LinkTable.of(kinds, [getattr(kind.factors, term) for kind in kinds], max(1.0, size), exchange)
            kinds[0].known_links[key] = (found.least() if least else found, kinds)
        return kinds[0].known_links[key][0]

    bytes_longer = messages.longest - messages.shortest

    def tables(tensor: int) -> list[LinkTable]:
        every = (messages.shortest / tensor, messages.longest / tensor)
        return [table("messages", size, Exchange(Operation.send_recv, 2, size)) for size in every]

    def hops(uses: PairUses, short: LinkTable, long: LinkTable) -> Hops:
        link = short.slowest(uses, orders)
        if not bytes_longer:
            return Hops(link, link.s_per_byte)
        most = messages.longest * long.slowest(uses, orders).s_per_byte
        # Longer messages may have been measured quicker, which bounds by the shortest one do not allow.
        return Hops(link, np.maximum(0.0, most - messages.shortest * link.s_per_byte) / bytes_longer)

    replicas, tensor = parallel.data, parallel.tensor_size
    summing = Operation.reduce_scatter if parallel.sharded_optimizer else Operation.all_reduce
    exchange = Exchange(summing, replicas, messages.sums * replicas, tensor)
    short, long = tables(1)
    ahead = hops(pairs.hops, short, long)
    back = hops(pairs.hops.back, short, long) if short.one_way or long.one_way else None
    by_cut = None
    if training.scatters_messages:
        of_parts, gather = tables(parallel.tensor_size), gathering_in_groups(kinds, orders, training, where.stages)
        ahead, by_cut = scattered(ahead, hops(pairs.hops, *of_parts), gather, training)
        if back is not None:
            back, _ = scattered(back, hops(pairs.hops.back, *of_parts), gather, training)
    of_sums = table("gradients", messages.sums, exchange)
    gathering = None
    if parallel.sharded_optimizer and any(kind.collectives is not None for kind in kinds):
        handed_out = Exchange(Operation.all_gather, replicas, messages.weights, tensor)
        gathering = table("gradients", messages.sums, handed_out).slowest(pairs.sums, orders)
    holders = min(sizes.shared_parameters(training.model, tensor)[1], parallel.pipeline)
    tied = Exchange(Operation.all_reduce, holders, messages.embedding * holders, tensor * replicas)
    placed = PlacedLinks(
        stages=where.stages,
        hops=ahead,
        back=back,
        scattered=by_cut,
        one_way_out=where.one_way_out,
        sums=of_sums.slowest(pairs.sums, orders),
        embedding=table("embedding", messages.embedding, tied).slowest(pairs.embedding, orders),
        gathering=gathering,
    )
    if not training.reduces_by_node or isinstance(where, HeterogeneousPlacement) or parallel.data == 1:
        return placed
    nodes, each = (int(most) for most in where.spread.max(axis=0))
    here = exchange._replace(ranks=each)
    there = Exchange(summing, nodes, exchange.bytes / each, tensor * each)
    within = table("gradients", messages.sums, here).slowest(pairs.sums, orders, inside=True)
    of_rings = table("gradients", messages.sums, there)  # so many on a node sum at once, each through its own card
    of_rings = replace(of_rings, alone=of_rings.alone / each)
    across = of_rings.slowest(pairs.sums, orders, inside=False)
    return replace(placed, gathering=None).with_sums_by_node(within, across, where, parallel.data, least=least)
