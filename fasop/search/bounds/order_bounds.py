"""Seconds below which plans are in any order of the nodes, and the orders that may be faster, by dynamic programming.

A partition whose largest stage has an amount of passes left takes that, and the first micro-batch's trip
(`fasop.partition.bounds`). Each stage has room for as many layers as the amount allows, and if a layer costs a price
wherever it is (Lagrange), the trip less what that room is worth is a sum over nodes, in which a node's part depends on
its kind, its place and the kind of the node before. So the least over all orders is found from the last node back, for
all amounts and some prices at once; with any price it is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from fasop.costs.arrays import Floats, Integers, distinct
from fasop.costs.hardware import NodeKind
from fasop.costs.network.link_table import has_pairs
from fasop.costs.training import Training
from fasop.partition.bounds import ROUNDING, never_less_until_summed
from fasop.partition.chains import chains_of
from fasop.simulation.linear import TINY, Linear
from fasop.simulation.nodes import Nodes
from fasop.simulation.on_nodes import on_nodes
from fasop.simulation.pipelines import Pipelines

AMOUNTS = 128
"""Amounts of an option that are told apart, at most."""
BETWEEN, BEYOND = (0.0, 0.25, 0.5, 0.75), (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0)
"""Prices of a layer: on the way from its shortest trip to its longest one, and times the longest one."""
MOST_STATES = 3000
"""Numbers of nodes of each kind, with the kind of the last one."""


class OrderBounds:
    """Bounds of plans of the same sizes with some options in all orders of these nodes, as far as below `enough`.

    Where stages have several nodes, of two kinds, the stages of a replica count: those on the faster kind are, for at
    least one replica, no more than if each stage had one kind.
    """

    def __init__(self, options: Sequence[Training], kinds: Sequence[NodeKind], enough: float) -> None:
        """All `options` have to be `known`."""
        self._enough, nodes = enough, [kind.group.count for kind in kinds]
        together = _nodes_of_stage(options[0], kinds)
        self.of_nodes = together == 1
        self._units = sum(nodes) // together
        self.every = [Units.of(one, kinds, self._units, together) for one in options]
        self.most = tuple(nodes)
        if not self.of_nodes:
            speed = self.every[0].trip.layer[:, 0]
            self.most = tuple(
                number // together if fast < speed.max() else self._units
                for number, fast in zip(nodes, speed, strict=True)
            )
        parts = [one.priced(options[0].blocks.layers, enough) for one in self.every]
        self._begin, self._start, self._hop, self._of_unit = (
            np.concatenate(part, axis=-2) for part in zip(*parts, strict=True)
        )
        self._rest: dict[tuple[tuple[int, ...], int], Floats] = {}

    @property
    def merged(self) -> list[Units]:
        """What no option takes less than one of: those with the same passes together."""
        found: dict[bytes, Units] = {}
        for one in self.every:
            passes = np.concatenate([one.forward.layer, one.backward.layer, one.trip.fixed, one.within]).tobytes()
            found[passes] = one.or_less(found.get(passes, one))
        return [*found.values()]

    @property
    def least(self) -> float:
        """Seconds below which no plan is; at most `enough`."""
        return min(self._seconds(self._onward((0,) * len(self.most), -1)), self._enough)

    def orders(self, most: int) -> Integers | None:
        """[orders, nodes]: the kind of the node in each place, in all orders that may have plans below `enough`; None
        if there are more of them than `most`."""
        found: list[tuple[int, ...]] = []
        begun: list[tuple[tuple[int, ...], tuple[int, ...], Floats]] = [((), (0,) * len(self.most), np.zeros(1))]
        while begun and len(found) <= most:
            order, used, seconds = begun.pop()
            for kind, after, step in self._steps(used, order[-1] if order else -1):
                reached = seconds + step
                if self._seconds(reached + self._onward(after, kind)) >= self._enough:
                    continue
                if len(order) + 1 < self._units:
                    begun.append(((*order, kind), after, reached))
                else:
                    found.append((*order, kind))
        return np.array(found, np.int64).reshape(-1, self._units) if len(found) <= most else None

    def _seconds(self, beside: Floats) -> float:
        """With the best price for each amount, and the best amount; `beside` amounts and prices."""
        return float((self._begin + beside).max(axis=1).min(initial=np.inf))

    def _steps(self, used: tuple[int, ...], last: int) -> list[tuple[int, tuple[int, ...], Floats]]:
        """Each kind that the next unit may be of, how many are used then, and what that adds."""
        place, found = sum(used), []
        for kind, most in enumerate(self.most):
            if used[kind] < most:
                before = self._start[kind] if last < 0 else self._hop[last, kind, place - 1]
                after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                found.append((kind, after, self._of_unit[kind, place] + before))
        return found

    def _onward(self, used: tuple[int, ...], last: int) -> Floats:
        """[amounts, prices]: what the other units add at least."""
        if sum(used) == self._units:
            return np.zeros(1)
        if (used, last) not in self._rest:
            ways = [step + self._onward(after, kind) for kind, after, step in self._steps(used, last)]
            self._rest[used, last] = np.minimum.reduce(ways)
        return self._rest[used, last]


def known(one: Training, kinds: Sequence[NodeKind]) -> bool:
    """Whether `OrderBounds` has them: stages lie in nodes, or nodes of two kinds in stages, and all is small enough.

    A stage of two kinds of nodes may sum its gradients in less time than one of either kind, where pairs of kinds have
    links of their own.
    """
    states = len(kinds) * math.prod(kind.group.count + 1 for kind in kinds)
    if len({kind.gpus for kind in kinds}) > 1 or states > MOST_STATES or not one.blocks.alike:
        return False
    within = kinds[0].gpus % (one.parallel.tensor_size * one.parallel.data) == 0
    around = len(kinds) == 2 and _nodes_of_stage(one, kinds) > 1 and not (one.reduces_by_node or has_pairs(kinds))
    around = around and len({*one.parallel.micro_batches_of}) == 1  # which replica has most of them is not known
    return (within or around) and not one.parallel.schedule.definition.has_chunks


def _nodes_of_stage(one: Training, kinds: Sequence[NodeKind]) -> int:
    """0 where they are no whole number."""
    width, gpus = one.parallel.tensor_size * one.parallel.data, kinds[0].gpus
    return 1 if gpus % width == 0 else 0 if width % gpus else width // gpus


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a plan takes by units, which are nodes, or stages that have several of one kind."""

    start: Floats
    """[kinds]: from the first stage's last backward pass on."""
    hop: Floats
    """[kinds, kinds, units]: messages from a unit to the one behind it, there and back."""
    within: Floats
    """[kinds, stages]: messages from a stage to the next one of its unit, there and back."""
    forward: Linear
    """[kinds, stages]: like all that follows."""
    backward: Linear
    trip: Linear
    """The first micro-batch, there and back."""
    own: Linear
    """All passes from the first one until the last gradient has left the stage."""
    left: Linear
    """The passes left when the first gradient has left the stage."""
    summed: Linear
    """Until the stage's gradients are summed."""

    @classmethod
    def of(cls, one: Training, kinds: Sequence[NodeKind], units: int, together: int) -> Units:
        # Kinds alternate, so that all pairs of neighbours are seen, in every place.
        pairs = [*product(range(len(kinds)), repeat=2)]
        alone = np.array([pairs.index((kind, kind)) for kind in range(len(kinds))])
        orders = np.array([[pair[unit % 2] for unit in range(units)] for pair in pairs])
        lines = on_nodes(one, Nodes(kinds, np.repeat(orders, together, axis=1)))
        # What nodes send each other may depend on others, and be quicker than among their own kind.
        if has_pairs(kinds):
            lines = replace(lines, hop=0 * lines.hop, back=None, embedding=0 * lines.embedding)
        hops = 2 * lines.mean_hop.reshape(units, -1, len(pairs))
        ahead = np.array([pairs.index(pair) for pair in pairs]).reshape(len(kinds), len(kinds), 1)
        back = np.array([pairs.index(pair[::-1]) for pair in pairs]).reshape(len(kinds), len(kinds), 1)
        place = np.arange(units)
        between = hops[place, -1, np.where(place % 2, back, ahead)]
        return cls._of_lines(lines.take(alone), one.blocks.layers, between)

    @classmethod
    def of_pipeline(cls, lines: Pipelines, layers: int) -> Units:
        """A single one as if all its stages were in one unit."""
        return cls._of_lines(lines, layers, np.zeros((1, 1, 1)))

    @classmethod
    def _of_lines(cls, lines: Pipelines, layers: int, hop: Floats) -> Units:
        chains, within = chains_of(lines), 2 * lines.mean_hop
        within[len(within) // hop.shape[2] - 1 :: len(within) // hop.shape[2]] = 0.0

        def of_kinds(part: Linear) -> Linear:
            return Linear(fixed=part.fixed.T, layer=part.layer.T)

        return cls(
            start=lines.optimizer.fixed[0] + lines.least_exposed[0] + lines.embedding,
            hop=hop,
            within=within.T,
            forward=of_kinds(lines.forward),
            backward=of_kinds(lines.backward),
            trip=of_kinds(chains.trip),
            own=of_kinds(chains.own),
            left=of_kinds(chains.left),
            summed=of_kinds(never_less_until_summed(lines, layers)),
        )

    def or_less(self, other: Units) -> Units:
        """With the less of both behind the passes, which are the same."""
        summed = Linear(
            fixed=np.minimum(self.summed.fixed, other.summed.fixed),
            layer=np.minimum(self.summed.layer, other.summed.layer),
        )
        hop = np.minimum(self.hop, other.hop)
        return replace(self, start=np.minimum(self.start, other.start), summed=summed, hop=hop)

    @property
    def fixed(self) -> Floats:
        """[kinds, units]: of the trip beside layers, and messages within a unit, there and back."""
        kinds, _, units = self.hop.shape
        return (self.trip.fixed + self.within).reshape(kinds, units, -1).sum(axis=2)

    def priced(self, layers: int, enough: float) -> tuple[Floats, Floats, Floats, Floats]:
        """[amounts, prices]: amounts and all layers' prices; [kinds, amounts, 1]: `start`; [kinds, kinds, units, 1, 1]:
        `hop`; and [kinds, units, amounts, prices]: `fixed` without what the room of a unit is worth."""
        fixed, shortest, longest = self.fixed, self.trip.layer.min(), self.trip.layer.max()
        prices = np.append(shortest + np.array(BETWEEN) * (longest - shortest), np.array(BEYOND) * longest)
        least = layers * shortest + fixed.min(axis=0).sum() + self.start.min()
        amounts, room = self._rooms(layers, enough, least)
        worth = np.maximum(0.0, prices - self.trip.layer[..., np.newaxis]).reshape(*fixed.shape, -1, len(prices))
        gained = np.einsum("kusa,kusp->kuap", room.reshape(*fixed.shape, -1, len(amounts)), worth, optimize=True)
        one = np.ones((len(amounts), 1))
        return (
            amounts[:, np.newaxis] + layers * prices,
            self.start[:, np.newaxis, np.newaxis] * one,
            self.hop[..., np.newaxis, np.newaxis] * one,
            fixed[..., np.newaxis, np.newaxis] - gained,
        )

    def _rooms(self, layers: int, enough: float, least: float) -> tuple[Floats, Floats]:
        """[amounts]: those at which a stage has room for one more layer, or the least of several; and [kinds, stages,
        amounts]: for how many there is room then, or with the largest of these. A stage of more layers than that is not
        done by `enough`, and there may be as much left as that allows beside the `least` trip."""
        fixed, layer = self.left.fixed[..., np.newaxis], self.left.layer[..., np.newaxis]
        firsts = distinct(fixed + np.arange(layers + 1) * layer)
        firsts = lasts = firsts[firsts <= max(enough - least, firsts[0])]
        if len(firsts) > AMOUNTS:
            chosen = np.linspace(0, len(firsts), AMOUNTS, endpoint=False).astype(int)
            lasts, firsts = firsts[np.append(chosen[1:], len(firsts)) - 1], firsts[chosen]
        done = np.floor((enough - self.summed.fixed) / np.maximum(self.summed.layer, TINY) + ROUNDING)
        room = np.where(layer > 0, np.floor((lasts - fixed) / np.maximum(layer, TINY) + ROUNDING), layers)
        return firsts, np.clip(np.minimum(room, done[..., np.newaxis]), 0, layers)
