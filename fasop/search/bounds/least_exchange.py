"""What plans exchange at least, in whatever order the nodes come: messages between stages, sums of gradients, and what
is handed out of new weights; seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.costs.arrays import Floats, Integers
from fasop.costs.hardware import NodeKind
from fasop.costs.layers import gradients_summed, weights_gathered
from fasop.costs.network.link_table import has_pairs
from fasop.costs.training import Training
from fasop.frozen import replace
from fasop.simulation.nodes import Nodes
from fasop.simulation.on_nodes import exchanged_on, handing_out


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What a plan takes beside its layers if all nodes are of one kind: seconds, by kind."""

    first: Floats
    """From the first stage's last backward pass until its gradients are summed, but for its layers'; and what any
    stage hands out of new weights."""
    sums: Floats
    """[layers + 1, kinds]: all gradients of a stage of so many layers."""
    last: Floats
    """The part of `sums` that the last bucket takes, which nothing hides."""
    handing: Floats
    """[layers + 1, kinds]: handing out the new weights of a stage of so many layers."""
    embedding: Floats
    round_s: Floats
    """For each of a stage's parameters, what replicas exchange for every micro-batch beside the passes: 0 where they
    sum gradients once an iteration."""

    def of(self, kinds: Sequence[int]) -> Alone:
        return Alone(
            first=self.first[kinds],
            sums=self.sums[:, kinds],
            last=self.last[kinds],
            handing=self.handing[:, kinds],
            embedding=self.embedding[kinds],
            round_s=self.round_s[kinds],
        )

    def or_less(self, other: Alone, where: NDArray[np.bool_]) -> Alone:
        """Return the less of both for the kinds `where` that may be, but for the embedding's."""
        parts = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        least = {name: np.where(where, np.minimum(own, others), own) for name, (own, others) in parts.items()}
        return Alone(**(least | {"embedding": self.embedding}))

    def or_more(self, other: Alone) -> Alone:
        """Return the more of both."""
        return Alone(
            **{field.name: np.maximum(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        )

    @classmethod
    def nothing(cls, layers: int, kinds: int) -> Alone:
        sizes = {"sums": (layers + 1, kinds), "handing": (layers + 1, kinds)}
        return cls(**{field.name: np.zeros(sizes.get(field.name, kinds)) for field in fields(cls)})


class OnLinks(NamedTuple):
    """What a plan's messages and sums take at least: seconds."""

    hops: float
    """All messages from the first stage to the last."""
    around: float
    """The message from the last stage to the first."""
    queue: float
    """For how long a message occupies the link between two stages that is busiest."""
    ending: float
    """From the first stage's last backward pass to the end of the iteration."""


class LinkBounds:
    """Bounds what plans on some nodes of these kinds exchange; what does not depend on their number is kept."""

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self._kinds = kinds
        self._names = [kind.name for kind in kinds]
        self._alone: dict[tuple[int, ...], Alone] = {}
        self._nodes: dict[tuple[int, ...], Nodes] = {}
        self._hops: dict[tuple[int, ...], tuple[Floats, Floats]] = {}
        self._alone_of_some: dict[tuple[int, ...], dict[tuple[int, ...], Alone]] = defaultdict(dict)
        self._links: dict[tuple[int, ...], dict[tuple[int, ...], OnLinks]] = defaultdict(dict)
        """What is known of some kinds, here with how many nodes of each, and then of sizes."""

    def some(self, kinds: Sequence[NodeKind]) -> list[int]:
        """The numbers of these kinds."""
        return [self._names.index(kind.name) for kind in kinds]

    def _counted(self, kinds: Sequence[NodeKind]) -> tuple[int, ...]:
        return *self.some(kinds), *(kind.group.count for kind in kinds)

    def of(self, plans: Sequence[Training], sets: Sequence[Sequence[NodeKind]]) -> list[OnLinks]:
        """Those of each plan on its set of nodes; all of these have the same kinds."""
        some, found = self.some(sets[0]), []
        of_sets = {
            number: self._links[self._counted(kinds)] for number, kinds in {id(one): one for one in sets}.items()
        }
        for one, kinds, alone in zip(plans, sets, self.alone_on(plans, sets), strict=True):
            key, known = _of_messages(one), of_sets[id(kinds)]
            if key not in known:
                known[key] = self._on_known_links(one, some, kinds, alone)
            found.append(known[key])
        return found

    def _on_known_links(self, one: Training, some: Sequence[int], kinds: Sequence[NodeKind], alone: Alone) -> OnLinks:
        p, nodes = one.parallel, [kind.group.count for kind in kinds]
        gpus, width = [kind.gpus for kind in kinds], p.tensor_size * p.data
        first = _of_any_stage(alone.first.tolist(), np.multiply(nodes, gpus).tolist(), width)
        if len({*gpus}) > 1:
            hops, around, queue = self._between_nodes(one, some, kinds)
            embedding = alone.embedding.min() if p.pipeline > 1 else 0.0
            return OnLinks(hops, around, queue, first + embedding)
        passing, busy = (part[:, some] for part in self._hops_of_one_kind(one, sum(nodes), gpus[0]))
        if gpus[0] % width and width % gpus[0]:  # stages lie on parts of nodes, whose links they share with few others
            hops, around, queue = self._between_nodes(one, some, kinds)
            hops, around = max(hops, passing[:-1].min(axis=1).sum()), max(around, passing[-1].min())
            embedding = self._embedding_of_parts(one, some, nodes, gpus[0], alone)
            return OnLinks(hops, around, queue, first + embedding)
        ends = sorted(zip(alone.embedding.tolist(), nodes, strict=True))
        first_and_last, fast = 2 * max(width, gpus[0]), 0
        embedding = ends[0][0]
        for seconds, number in ends if p.world_size >= first_and_last else ():
            embedding = seconds
            fast += number * gpus[0]
            if fast >= first_and_last:
                break
        last_of_node = max(1, gpus[0] // width) - 1
        occupied = np.minimum(busy, passing)[last_of_node : -1 : last_of_node + 1]
        queue = float(occupied.min(axis=0).max()) if len(occupied) else 0.0  # every node sends to another one
        return OnLinks(_through(passing, width, gpus[0], nodes), passing[-1].min(), queue, first + embedding)

    def _embedding_of_parts(
        self, one: Training, some: Sequence[int], nodes: Sequence[int], gpus: int, alone: Alone
    ) -> float:
        """The embedding's part of `ending` where stages lie on parts of nodes.

        The first stage and the last one each have as many whole nodes, and some GPUs of another, which two stages
        share. The sum is done when the slowest node is; those in part, whose GPUs share their link with fewer, take
        less.
        """
        p, found = one.parallel, float(alone.embedding.min())
        if found == 0 or has_pairs(self._kinds):
            return found
        whole, left = divmod(p.tensor_size * p.data, gpus)
        of_whole = of_part = self._of_one_kind(one, sum(nodes), gpus).of(some).embedding
        if p.pipeline == 2:
            return float(of_whole.max())
        if whole:
            apart = self._of_one_kind(one, p.world_size // p.tensor_size, p.tensor_size).of(some).embedding
            of_part = apart + (of_whole - apart) * (left - p.tensor_size) / (gpus - p.tensor_size)
        for needed, seconds in ((2 * whole, of_whole), (2 * whole + 2, of_part)):
            fastest = np.argsort(seconds, kind="stable")
            enough = np.searchsorted(np.cumsum(np.array(nodes)[fastest]), needed)
            found = max(found, float(seconds[fastest[enough]])) if needed else found
        return found

    def _hops_of_one_kind(self, one: Training, nodes: int, gpus: int) -> tuple[Floats, Floats]:
        """How long the shortest messages take, as `exchanged_on` has it, and occupy their links: [stages, kinds]."""
        key = nodes, gpus, *_of_messages(one)
        if key not in self._hops:
            link, size = self._nodes_of_one_kind(nodes, gpus).links_of(one).hops.link, float(min(one.messages))
            self._hops[key] = link.takes(np.array(size)), size * link.s_per_byte
        return self._hops[key]

    def _between_nodes(
        self, one: Training, some: Sequence[int], kinds: Sequence[NodeKind]
    ) -> tuple[float, float, float]:
        """`hops`, `around` and `queue` of the messages from node to node, of which there are so many in any order, if
        each has a link to itself."""
        p = one.parallel
        if p.pipeline == 1 or p.context > 1 or any(kind.collectives is not None for kind in kinds):
            return 0.0, 0.0, 0.0
        apart = replace(one, parallel=replace(p, data=1, expert=1, pipeline=2, shares=None))
        link = self._nodes_of_one_kind(2, p.tensor_size).links_of(apart).hops.link
        size = float(min(one.messages))
        hop, busy = (part[0, some] for part in (link.takes(np.array(size)), size * link.s_per_byte))
        width, slowest_first = p.tensor_size * p.data, np.argsort(-hop, kind="stable")
        nodes, gpus = np.array([(kind.group.count, kind.gpus) for kind in kinds])[slowest_first].T
        # A node has messages within it from all its whole stages but the last; all others leave a node or enter one,
        # at least one of each node.
        within = np.cumsum(nodes * np.maximum(0, gpus // width - 1))
        touching = -(-np.cumsum(nodes * gpus) // width) - 1 - within
        seconds = hop[slowest_first]
        total = float(np.maximum(1, touching) @ (seconds - np.append(seconds[1:], 0.0)))
        return total, float(hop.min()), float(np.minimum(busy, hop).max())

    def alone_on(self, plans: Sequence[Training], sets: Sequence[Sequence[NodeKind]]) -> list[Alone]:
        """Those of each plan on its set of nodes; all of these have the same kinds. Those of plans that exchange the
        same are one object; how many nodes there are of each kind does not matter beside how many GPUs there are of
        all."""
        known, found = self._alone_of_some[tuple(self.some(sets[0]))], []
        for one, kinds in zip(plans, sets, strict=True):
            p = one.parallel
            key = p.sharded_optimizer, p.tensor_size, p.data, p.world_size, p.context, p.expert
            if key not in known:
                known[key] = self._find_alone(one, kinds)
            found.append(known[key])
        return found

    def _find_alone(self, one: Training, kinds: Sequence[NodeKind]) -> Alone:
        """What the plan takes beside its layers, by these kinds.

        Where nodes differ in GPUs, it is of a stage that lies in a node if there is room for it, and else of one whose
        tensor groups lie on a node each. So it is where stages share nodes of several kinds with other stages: the
        slow ones may be those that a stage has to itself.
        """
        p, some = one.parallel, self.some(kinds)
        gpus, width = np.array([kind.gpus for kind in kinds]), p.tensor_size * p.data
        shared = len(kinds) > 1 and gpus[0] % width > 0 and width % gpus[0] > 0
        if len({*gpus.tolist()}) == 1 and not shared:
            return self._of_one_kind(one, sum(kind.group.count for kind in kinds), int(gpus[0])).of(some)
        if one.reduces_by_node or p.context > 1 or any(kind.collectives is not None for kind in kinds):
            return Alone.nothing(one.blocks.layers, len(kinds))
        found = self._of_one_kind(one, p.world_size // p.tensor_size, p.tensor_size).of(some)
        if (gpus >= width).any():
            found = found.or_less(self._of_one_kind(one, 1, p.world_size).of(some), gpus >= width)
        if len({*gpus.tolist()}) > 1 or has_pairs(self._kinds):
            return found
        return found.or_more(self._on_quickest_links(one, sum(kind.group.count for kind in kinds), int(gpus[0]), some))

    def _of_one_kind(self, one: Training, nodes: int, gpus: int) -> Alone:
        return self._known_alone(one, (nodes, gpus), lambda: self._nodes_of_one_kind(nodes, gpus))

    def _on_quickest_links(self, one: Training, nodes: int, gpus: int, some: Sequence[int]) -> Alone:
        """What the plan takes beside its layers if every node's links are as quick as the quickest of these kinds':
        where stages share nodes, the places alone say by how many ranks a link is used."""
        return self._known_alone(one, (nodes, gpus, *some), lambda: self._quickest_nodes(nodes, gpus, some))

    def _known_alone(self, one: Training, of_nodes: tuple[int, ...], nodes: Callable[[], Nodes]) -> Alone:
        p = one.parallel
        key = p.sharded_optimizer, p.tensor_size, p.data, p.context, p.expert, *of_nodes
        if key not in self._alone:
            every = nodes()
            exchanged, handing = exchanged_on(one, every), handing_out(one, every)
            sums, last = exchanged.sums, exchanged.last
            amount = np.arange(one.blocks.layers + 1.0).reshape(-1, 1, 1)
            of_layers = [part.of(amount).min(axis=1) if one.blocks.alike else part.fixed for part in (sums, handing)]
            self._alone[key] = Alone(
                first=exchanged.least_exposed[0] + handing.fixed.min(axis=0),
                sums=of_layers[0],
                last=np.zeros(len(every.kinds)) if last is None else last.min(axis=0),
                handing=of_layers[1],
                embedding=exchanged.embedding,
                round_s=_round_s(one, every),
            )
        return self._alone[key]

    def _quickest_nodes(self, nodes: int, gpus: int, some: Sequence[int]) -> Nodes:
        """So many of an imagined kind."""
        if (nodes, gpus, *some) not in self._nodes:
            kinds = [self._kinds[kind] for kind in some]
            groups, factors = [kind.group for kind in kinds], [kind.factors for kind in kinds]
            group = replace(
                groups[0],
                intra_latency_us=min(group.intra_latency_us for group in groups),
                intra_gbit_per_s=max(group.intra_gbit_per_s for group in groups),
                inter_latency_us=min(group.inter_latency_us for group in groups),
                inter_gbit_per_s=max(group.inter_gbit_per_s for group in groups),
            )
            least = {
                name: min(getattr(one, name) for one in factors) for name in ("messages", "gradients", "embedding")
            }
            quickest = replace(kinds[0], gpus=gpus, group=group, factors=replace(factors[0], **least))
            self._nodes[nodes, gpus, *some] = Nodes([quickest], np.zeros((1, nodes), np.int64))
        return self._nodes[nodes, gpus, *some]

    def _nodes_of_one_kind(self, nodes: int, gpus: int) -> Nodes:
        """So many with so many GPUs each, an order for each kind."""
        if (nodes, gpus) not in self._nodes:
            alike = [kind if kind.gpus == gpus else replace(kind, gpus=gpus) for kind in self._kinds]
            orders = np.repeat(np.arange(len(alike))[:, np.newaxis], nodes, axis=1)
            self._nodes[nodes, gpus] = Nodes(alike, orders, least=True)
        return self._nodes[nodes, gpus]


def _of_messages(one: Training) -> tuple[int, ...]:
    """What messages and links depend on beside the nodes."""
    p = one.parallel
    sizes = p.tensor_size, p.data, p.context, p.expert, p.micro_batch_size
    return *sizes, p.sequence_parallel, p.sharded_optimizer


def _round_s(one: Training, nodes: Nodes) -> Floats:
    """`Alone.round_s`: gradients are summed after each micro-batch, and weights may be gathered for both its passes."""
    where, data = nodes.links_of(one), one.parallel.data
    if not (one.scatters and one.overlaps):
        return np.zeros(len(nodes.orders))
    seconds = gradients_summed(where.sums, one).s_per_byte
    if one.gathers:
        seconds = seconds + 2 * weights_gathered(where.handing, one, data).s_per_byte
    return np.asarray(seconds.min(axis=0))


def of_any_stage(seconds: Floats, gpus: Integers, width: Integers) -> Floats:
    """[plans, layers]: what any stage takes at least, of `width` [plans] GPUs: the slowest of its kinds counts, and
    those that take less have no more GPUs than that. `seconds` are [plans, kinds, layers], `gpus` [plans, kinds]."""
    order = np.argsort(seconds, axis=1, kind="stable")
    held = np.cumsum(np.take_along_axis(np.broadcast_to(gpus[..., np.newaxis], seconds.shape), order, axis=1), axis=1)
    enough = np.argmax(held >= width[:, np.newaxis, np.newaxis], axis=1)[:, np.newaxis]
    return np.asarray(np.take_along_axis(seconds, np.take_along_axis(order, enough, axis=1), axis=1)[:, 0])


def _of_any_stage(seconds: Sequence[float], gpus: Sequence[int], width: int) -> float:
    """Do as `of_any_stage`, of a single plan and number."""
    slowest, held = math.inf, 0
    for taken, number in sorted(zip(seconds, gpus, strict=True)):
        if held < width:
            slowest, held = taken, held + number
    return slowest


def _through(hops: Floats, width: int, gpus: int, nodes: Sequence[int]) -> float:
    """Seconds of messages from the first stage to the last, at least; `hops` are [stages, kinds], if alone. Nodes have
    whole stages, or stages whole nodes.

    A message between nodes is as slow as the slower one: of n nodes in a row, j slow ones have j slow links beside
    them, but for the last. Likewise of stages that have whole nodes.
    """
    if len(hops) == 1:
        return 0.0
    inside = max(1, gpus // width)
    between, within = hops[inside - 1 : -1 : inside], hops[: inside - 1]
    total = float(within.sum(axis=0) @ np.array(nodes))
    if not len(between):
        return total
    together, seen, units = max(1, width // gpus), 0, 0
    seconds, last = between.min(axis=0), 0.0
    for kind in np.argsort(-seconds, kind="stable"):
        seen += nodes[kind]
        slow = -(-seen // together)
        if slow > units:
            total += (slow - units) * seconds[kind]
            last, units = seconds[kind], slow
    return float(total - last)
