"""Pipelines as numbers: what every stage of many plans takes, as a linear function of its layers.

A layer is a block of the model that a partition counts. Where all are alike, a stage is its number of layers, and all
its times and its memory are linear in it. Where they differ, they are linear in the numbers of each kind of layer,
which follow from a partition and the `LayerOrder`. Arrays are [stages, pipelines], times seconds. With
several chunks to a stage, its parts of the model have rows of their own: [parts, pipelines], where part c * stages + s
is chunk c of stage s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasop.compiled import bounds as compiled
from fasop.costs.arrays import Floats, Integers, rolled
from fasop.frozen import replace
from fasop.simulation.linear import Again, BackwardMessages, Hidden, LayerOrder, Layers, Linear
from fasop.simulation.loaded import PartitionedPipelines, Parts
from fasop.simulation.vectorised import Times, Traffic
from megatron_ext.contract.parallel_config import Schedule

Columns = Integers | slice
"""Numbers of pipelines, or all of them."""
FULL = 1 + 1e-9
"""The part of a memory that may be taken, but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Plans of the same sizes and schedule on different nodes."""

    schedule: Schedule
    micro_batches: int
    forward: Linear
    """[parts, pipelines]"""
    backward: Linear
    """[parts, pipelines]"""
    hop: Floats
    """From the end of a pass until the next stage has its result; in row s from s to s + 1, in the last row from the
    last stage to the first; and back, if `back` says nothing else."""
    sums: Linear
    """All the gradients of a stage, over its replicas; `exposed` is what nothing hides."""
    optimizer: Linear
    """The step and, with a sharded optimizer, handing out its results."""
    embedding: Floats
    """[pipelines]: the embedding's gradients of the first and the last stage; 0 for a single one."""
    capacity: Integers
    """The most layers that memory allows; negative where not even the stage without layers fits. Of several chunks, if
    they share the layers evenly."""
    basis: Integers
    """[pipelines]: what the times rest on (`fasop.costs.layers.Basis`)."""
    shares: Floats | None = None
    """[moments, parts, pipelines]: of several chunks, the part of its stage's free memory that a layer of each takes,
    at all moments that may be the fullest."""
    hidden: Hidden | None = None
    """None: gradients are summed after the last backward pass."""
    busy: Floats | None = None
    """[stages, pipelines]: for how much of `hop` the link is occupied; None: all of it."""
    one_way_out: NDArray[np.bool_] | None = None
    """[stages]: whether messages to both neighbours leave by one link; None: only of two stages."""
    blocking: bool = False
    """Whether stages wait until what they send has arrived."""
    order: LayerOrder | None = None
    """None: all layers are alike. Else `capacity` is of the smallest kind, `shares` are [moments, kinds, parts,
    pipelines], and `hop` and `busy` are of the shortest messages."""
    s_per_byte: Floats | None = None
    """[stages, pipelines]: with an `order`, of what messages are longer."""
    back: BackwardMessages | None = None
    replicas: tuple[HeterogeneousReplicas, ...] = ()
    """Pipelines no replica of which is as slow as `forward`, `backward` and `optimizer` in all stages. All other fields
    are the same for each of their replicas. An iteration ends when the slowest replica is done."""

    def __len__(self) -> int:
        return len(self.basis)

    @property
    def stages(self) -> int:
        return len(self.hop)

    @property
    def parts_count(self) -> int:
        """Count the model's parts: as many to a stage as it has chunks. A partition has a row for each."""
        return len(self.forward.fixed)

    def take(self, columns: Integers) -> Pipelines:
        """Some of them, or some of them several times."""
        if len(columns) == len(self) and (columns == np.arange(len(columns))).all():
            return self
        return replace(
            self,
            forward=self.forward.take(columns),
            backward=self.backward.take(columns),
            hop=self.hop[:, columns],
            sums=self.sums.take(columns),
            optimizer=self.optimizer.take(columns),
            embedding=self.embedding[columns],
            capacity=self.capacity[:, columns],
            shares=None if self.shares is None else self.shares[..., columns],
            basis=self.basis[columns],
            hidden=None if self.hidden is None else self.hidden.take(columns),
            busy=None if self.busy is None else self.busy[:, columns],
            s_per_byte=None if self.s_per_byte is None else self.s_per_byte[:, columns],
            back=None if self.back is None else self.back.take(columns),
            replicas=tuple(some for one in self.replicas if len((some := one.take(columns)).of)),
        )

    @property
    def occupied(self) -> Floats:
        """[stages, pipelines]: for how long a message occupies its link."""
        return self.hop if self.busy is None else np.minimum(self.busy, self.hop)

    @property
    def mean_hop(self) -> Floats:
        """[stages, pipelines]: of there and back."""
        return self.hop if self.back is None else (self.hop + self.back.hop) / 2

    def counted(self, layers: Layers) -> Layers:
        """What times are linear in: the layers of each part and, where they differ, [kinds, parts, pipelines]."""
        return layers if self.order is None else self.order.by_kind(np.asarray(layers, np.int64))

    def held(self, layers: Layers) -> Layers:
        """The same of each stage, in all its chunks: [stages, pipelines] or [kinds, stages, pipelines]."""
        return self._of_stages(self.counted(layers))

    def _of_stages(self, counted: Layers) -> Layers:
        if self.parts_count == self.stages:
            return counted
        return counted.reshape(*counted.shape[:-2], -1, self.stages, counted.shape[-1]).sum(axis=-3)

    def fits(self, layers: Integers) -> NDArray[np.bool_]:
        """[pipelines]: whether every stage has the memory for its layers."""
        if self.order is not None:
            assert self.shares is not None
            of_parts = (self.shares * self.counted(layers)).sum(axis=1)
            of_stages = of_parts.reshape(len(of_parts), -1, self.stages, layers.shape[1]).sum(axis=1)
            return np.asarray(np.all(of_stages <= FULL, axis=(0, 1)))
        fitting: NDArray[np.bool_] = np.all(self.held(layers) <= self.capacity, axis=0)
        if self.shares is not None:
            fitting &= np.all(self._taken(self.shares, layers) <= FULL, axis=(0, 1))
        return fitting

    def _taken(self, shares: Floats, layers: Layers) -> Floats:
        """[moments, stages, pipelines]: the part of each stage's memory that its chunks take."""
        return (shares * layers).reshape(len(shares), -1, self.stages, len(self)).sum(axis=1)

    def loaded(self, layers: Layers) -> PartitionedPipelines:
        """With a partition each, [parts, pipelines]."""
        counted = self.counted(layers)
        held = self._of_stages(counted)
        hop, busy = self.messages(layers)
        hop_back, busy_back = (hop, busy) if self.back is None else self.messages_back(layers)
        back, one_way_out = rolled(hop_back, 1, 0), self.one_way_out
        return PartitionedPipelines(
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            blocking=self.blocking,
            times=Times(
                forward=self.forward.of(counted),
                backward=self.backward.of(counted),
                send_forward=hop,
                send_backward=back,
                start=self.optimizer.of(held),
            ),
            traffic=Traffic(
                forward=busy,
                backward=back if busy_back is hop_back else rolled(busy_back, 1, 0),
                one_way_out=np.full(self.stages, self.stages == 2) if one_way_out is None else one_way_out,
            ),
            exposed=self.exposed(held),
            embedding=self.embedding,
        )

    def iteration(self, layers: Layers, limit: Floats | None = None) -> Floats:
        """[pipelines]: seconds of an iteration, once the first one is over; see `fasop.simulation.loaded`.

        What is not below its `limit` may come out too low, but not below the limit.
        """

        def seconds(lines: Pipelines, of: Columns) -> list[Floats]:
            return [lines.loaded(layers[..., of]).iteration(None if limit is None else limit[of])]

        return self.of_slowest_replicas(seconds)[0]

    def parts(self, layers: Layers) -> Parts:
        """Where the time of such an iteration goes."""
        names = [field.name for field in fields(Parts)]

        def of_lines(lines: Pipelines, of: Columns) -> list[Floats]:
            parts = lines.loaded(layers[..., of]).parts()
            return [getattr(parts, name) for name in names]

        return Parts(**dict(zip(names, self.of_slowest_replicas(of_lines), strict=True)))

    def of_slowest_replicas(self, of_lines: Callable[[Pipelines, Columns], Sequence[Floats]]) -> list[Floats]:
        """Arrays [..., pipelines] that `of_lines` gives, of each pipeline those of its slowest replica.

        Args:
            of_lines: gets pipelines whose replicas are all alike, and the numbers of the pipelines here that they
                belong to. Its first array decides which replica is the slowest.
        """
        whole = [*of_lines(self, slice(None))]
        if not self.replicas:
            return whole
        every = [of_lines(one.lines, one.of) for one in self.replicas]
        of = np.concatenate([one.of for one in self.replicas])
        arrays = [np.concatenate(parts, axis=-1) for parts in zip(*every, strict=True)]
        fastest_last = np.argsort(-arrays[0], kind="stable")
        slowest = fastest_last[np.unique(of[fastest_last], return_index=True)[1]]
        found = [array.copy() for array in whole]
        for array, own in zip(found, arrays, strict=True):
            array[..., of[slowest]] = own[..., slowest]
        return found

    def exposed(self, held: Layers) -> Floats:
        """[stages, pipelines]: seconds from a stage's last backward pass until its gradients are summed."""
        return self.sums.of(held) if self.hidden is None else self.hidden.left(self.sums, held)

    @property
    def least_exposed(self) -> Floats:
        """[stages, pipelines]: what `exposed` is at least."""
        return self.sums.fixed if self.hidden is None else np.minimum(self.sums.fixed, self.hidden.last)

    def slopes(self, layers: Layers, known: Floats | None = None) -> Floats:
        """[parts, pipelines]: seconds that the longest path of the iteration gains with a layer of each part; where
        layers differ [kinds, parts, pipelines], without what longer messages take."""
        return self.longest(layers, known)[0]

    def longest(self, layers: Layers, known: Floats | None = None) -> tuple[Floats, Floats]:
        """`slopes`, and [pipelines] the iteration's seconds, which may be `known`.

        Every path takes a time that is linear in the layers, and the iteration the longest of them; so with any other
        partition it takes at least its time with this one, plus these slopes times the difference. That holds where
        no backward pass hides anything of the sums; see `unhidden`.
        """
        slopes, seconds, _ = self.longest_with_messages(layers, known)
        return slopes, seconds

    def longest_with_messages(self, layers: Layers, known: Floats | None = None) -> tuple[Floats, Floats, Floats]:
        """`longest`, and [stages, pipelines] the seconds that the path gains with each byte by which the messages of a
        stage and those back to it are longer; nothing where all are alike, or stages wait for what they send."""

        def of_lines(lines: Pipelines, of: Columns) -> list[Floats]:
            here = layers[..., of]
            path = lines.loaded(here).longest(None if self.replicas else known)
            exposed = lines.sums.layer if lines.hidden is None else lines.hidden.slopes(lines.sums, lines.held(here))
            by_stage = path.start * lines.optimizer.layer + path.end * exposed
            slopes: Floats = (
                path.forward * lines.forward.layer
                + path.backward * lines.backward.layer
                + np.tile(by_stage, (lines.parts_count // lines.stages, 1))
            )
            return [path.total, slopes, lines._of_bytes(path.messages)]

        seconds, slopes, of_bytes = self.of_slowest_replicas(of_lines)
        return slopes, seconds, of_bytes

    def _of_bytes(self, messages: Floats | None) -> Floats:
        """[stages, pipelines]: seconds that so many messages [2, stages, pipelines] take longer for a byte more."""
        if messages is None or self.s_per_byte is None:
            return np.zeros_like(self.hop)
        back = self.s_per_byte if self.back is None else self.back.s_per_byte
        assert back is not None
        of_bytes: Floats = messages[0] * self.s_per_byte + rolled(messages[1], -1, 0) * back
        return of_bytes

    def without_order(self, longer: Floats) -> Pipelines:
        """The same for any layers of each kind, [kinds, parts, pipelines], that need not be a partition's; messages
        over the cuts behind stages are so many bytes longer than the shortest, [stages, 1]."""
        assert self.s_per_byte is not None
        more, back = longer * self.s_per_byte, self.back
        if back is not None:
            hop, busy = back.messages(np.broadcast_to(longer, back.hop.shape))
            back = replace(back, hop=hop, busy=busy)
        return replace(
            self,
            hop=self.hop + more,
            busy=None if self.busy is None else self.occupied + more,
            back=back,
            order=None,
            shares=None,
            replicas=tuple(replace(own, lines=own.lines.without_order(longer)) for own in self.replicas),
        )

    def unhidden(self, layers: int) -> Pipelines:
        """The same without anything hidden or computed again, where no stage sums or passes for longer, however many
        of the layers it has."""
        if self.backward.again is not None:
            return self._not_again().unhidden(layers)
        if self.hidden is None:
            return self
        sums = self._line_below(self.hidden, layers) if self.order is None else self._sums_left(self.hidden)
        replicas = tuple(replace(one, lines=one.lines.unhidden(layers)) for one in self.replicas)
        return replace(self, sums=sums, hidden=None, replicas=replicas)

    def _not_again(self) -> Pipelines:
        """The same whose passes compute nothing again; of what hides sums nothing changes."""
        replicas = tuple(replace(one, lines=one.lines._not_again()) for one in self.replicas)
        return replace(self, backward=replace(self.backward, again=None), replicas=replicas)

    def _line_below(self, hidden: Hidden, layers: int) -> Linear:
        """Return a line below `exposed` of up to so many layers, all alike, that meets it without any."""
        if hasattr(compiled, "least_slopes"):
            again = hidden.time.again
            most = np.zeros(len(self), np.int64) if again is None else again.most
            fixed, layer = compiled.least_slopes(self.sums.fixed, self.sums.layer, hidden.rows, most, layers)
            return Linear(fixed=fixed, layer=layer)
        amount = np.arange(layers + 1).reshape(-1, 1, 1)
        exposed = self.exposed(amount)
        return Linear(fixed=exposed[0], layer=((exposed[1:] - exposed[0]) / amount[1:]).min(axis=0))

    def _sums_left(self, hidden: Hidden) -> Linear:
        """Return a line below `exposed` where layers differ: where no kind of layer has its sums hidden, what is left
        of those; elsewhere what there is at least."""
        most, again = hidden.time.layer, hidden.time.again
        if again is not None:
            most = most + again.layer
        left = self.sums.layer - most
        longer = (left >= 0).all(axis=0) & (hidden.time.fixed <= 0) & (most >= 0).all(axis=0)
        return Linear(fixed=np.where(longer, self.sums.fixed, self.least_exposed), layer=np.where(longer, left, 0.0))

    def messages(self, layers: Layers) -> tuple[Floats, Floats]:
        """[stages, pipelines] each: `hop` and `occupied` with a partition.

        Of several chunks' messages of a stage the longest one counts.
        """
        if self.order is None:
            return self.hop, self.occupied
        assert self.s_per_byte is not None
        extra = self.order.extra_of_stages(np.asarray(layers, np.int64), self.stages)
        longer = extra * self.s_per_byte
        hop = self.hop + longer
        return hop, hop if self.busy is None else np.minimum(self.busy + longer, hop)

    def messages_back(self, layers: Layers) -> tuple[Floats, Floats]:
        """The same of gradients, in the rows of `BackwardMessages`."""
        if self.back is None:
            return self.messages(layers)
        if self.order is None:
            return self.back.messages(None)
        return self.back.messages(self.order.extra_of_stages(np.asarray(layers, np.int64), self.stages))


@dataclass(frozen=True, kw_only=True)
class HeterogeneousReplicas:
    """Replicas of some pipelines, with as many micro-batches each: one of every kind, by the nodes that it lies on."""

    lines: Pipelines
    """One pipeline for each of them."""
    of: Integers
    """[pipelines of `lines`], in increasing order: the number of the pipeline that each is a replica of."""

    def take(self, columns: Integers) -> HeterogeneousReplicas:
        """Those of so many of the pipelines, which are numbered anew."""
        own, of = self.those_of(columns)
        return HeterogeneousReplicas(lines=self.lines.take(own), of=of)

    def those_of(self, columns: Integers) -> tuple[Integers, Integers]:
        """The numbers of `lines` that are replicas of so many pipelines, and the places of these in `columns`."""
        first = np.searchsorted(self.of, columns)
        counts = np.searchsorted(self.of, columns, side="right") - first
        begins = np.cumsum(counts) - counts
        own: Integers = np.repeat(first - begins, counts) + np.arange(counts.sum())
        return own, np.repeat(np.arange(len(columns)), counts)


def joined(several: Sequence[Pipelines]) -> Pipelines:
    """One after another; of the same sizes and schedule, on nodes with the same numbers of GPUs."""
    if len(several) == 1:
        return several[0]
    apart = ("one_way_out", "order", "replicas")
    by_column = [field.name for field in fields(Pipelines) if field.name not in apart]
    values = {name: _joined([getattr(one, name) for one in several]) for name in by_column}
    return replace(several[0], **values, replicas=_joined_replicas(several))


def _joined_replicas(several: Sequence[Pipelines]) -> tuple[HeterogeneousReplicas, ...]:
    by_count, before = defaultdict[int, list[HeterogeneousReplicas]](list), 0
    for one in several:
        for own in one.replicas:
            by_count[own.lines.micro_batches].append(replace(own, of=own.of + before))
        before += len(one)
    return tuple(
        HeterogeneousReplicas(lines=joined([own.lines for own in some]), of=np.concatenate([own.of for own in some]))
        for some in by_count.values()
    )


def _joined(values: Sequence[Any]) -> Any:
    """Arrays [..., pipelines], or what is made of such; of anything else, which all have in common, the first."""
    match values[0]:
        case np.ndarray():
            return np.concatenate(values, axis=-1)
        case Linear() as first:
            fixed, layer = (_joined([getattr(value, name) for value in values]) for name in ("fixed", "layer"))
            return replace(first, fixed=fixed, layer=layer, again=Again.joined(values))
        case Hidden() | BackwardMessages() as first:
            parts = {name: _joined([getattr(value, name) for value in values]) for name in vars(first)}
            return replace(first, **parts)
        case first:
            return first
