"""Pipelines as numbers: what every stage of many plans takes, as a linear function of its layers.

A layer is a block of the model that a partition counts. Where all are alike, a stage is its number of layers, and all
its times and its memory are linear in it. Where they differ, they are linear in the numbers of each kind of layer,
which follow from a partition and the `LayerOrder`. Arrays are [stages, pipelines], times seconds. With
several chunks to a stage, its parts of the model have rows of their own: [parts, pipelines], where part c * stages + s
is chunk c of stage s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.schema.experiment import Schedule
from fasop.costs.arrays import Floats, Integers
from fasop.simulation import blocking
from fasop.simulation.times import Times, Traffic
from fasop.simulation.vectorised import ends, longest

FULL = 1 + 1e-9
"""The part of a memory that may be taken, but for rounding."""
Layers = Integers | Floats
"""Partitions: whole numbers, but in a bound also parts of layers."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """What a stage, or a part, takes, [stages, pipelines] each: `fixed + layers * layer`.

    Of layers of several kinds `layer` is [kinds, stages, pipelines], and so are `layers`.
    """

    fixed: Floats
    layer: Floats

    def of(self, layers: Layers) -> Floats:
        if self.layer.ndim > self.fixed.ndim:
            whole: Floats = self.fixed + (layers * self.layer).sum(axis=0)
            return whole
        return self.fixed + layers * self.layer

    def take(self, columns: Integers) -> Linear:
        return Linear(fixed=self.fixed[:, columns], layer=self.layer[..., columns])


@dataclass(frozen=True, kw_only=True)
class LayerOrder:
    """The layers of a model, in their order, where they are of several kinds."""

    counts: Integers
    """[kinds, layers + 1]: how many of each kind are among so many first ones."""
    extra: Floats
    """[layers + 1]: bytes by which the messages across a cut behind so many layers are longer than the shortest."""

    @property
    def layers(self) -> int:
        return int(self.counts.shape[1]) - 1

    def by_kind(self, partitions: Integers) -> Integers:
        """[kinds, parts, partitions], of partitions [parts, partitions]."""
        behind = self.counts[:, np.cumsum(partitions, axis=0)]
        behind[:, 1:] -= behind[:, :-1].copy()
        found: Integers = behind
        return found


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What the last backward pass hides of summing the gradients (fasop/costs/overlap.py)."""

    time: Linear
    """Of the pass, after the first bucket was complete; negative where none is."""
    last: Floats
    """[stages, pipelines]: what the last bucket takes, which nothing hides."""

    def take(self, columns: Integers) -> Hidden:
        return Hidden(time=self.time.take(columns), last=self.last[:, columns])


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the time of an iteration goes, by pipeline."""

    total: Floats
    """From the end of one iteration to the end of the next."""
    pipeline: Floats
    """Until the last backward pass has ended."""
    sums: Floats
    """The rest, until all gradients are summed over the replicas."""
    embedding: Floats
    """The rest, until the embedding's are summed too."""
    optimizer: Floats
    """The longest of the stages' steps. A stage that is done early begins the next iteration early, so that this
    overlaps with `pipeline`."""

    def of(self, column: int) -> Parts:
        """Those of one pipeline."""
        here = slice(column, column + 1)
        return Parts(**{name: seconds[here] for name, seconds in vars(self).items()})


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
    """From the end of a pass until the next stage has its result; in row s from s to s + 1 and back, in the last row
    from the last stage to the first."""
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

    def __len__(self) -> int:
        return len(self.basis)

    @property
    def stages(self) -> int:
        return len(self.hop)

    @property
    def parts_count(self) -> int:
        """Of the model: as many to a stage as it has chunks. A partition has a row for each."""
        return len(self.forward.fixed)

    def take(self, columns: Integers) -> Pipelines:
        """Some of them, or some of them several times."""
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
        )

    @property
    def occupied(self) -> Floats:
        """[stages, pipelines]: for how long a message occupies its link."""
        return self.hop if self.busy is None else np.minimum(self.busy, self.hop)

    def counted(self, layers: Layers) -> Layers:
        """What times are linear in: the layers of each part and, where they differ, [kinds, parts, pipelines]."""
        return layers if self.order is None else self.order.by_kind(np.asarray(layers, np.int64))

    def held(self, layers: Layers) -> Layers:
        """The same of each stage, in all its chunks: [stages, pipelines] or [kinds, stages, pipelines]."""
        return self._of_stages(self.counted(layers))

    def _of_stages(self, counted: Layers) -> Layers:
        if self.parts_count == self.stages:
            return counted
        held: Layers = counted.reshape(*counted.shape[:-2], -1, self.stages, counted.shape[-1]).sum(axis=-3)
        return held

    def fits(self, layers: Integers) -> NDArray[np.bool_]:
        """[pipelines]: whether every stage has the memory for its layers."""
        if self.order is not None:
            assert self.shares is not None
            of_parts = (self.shares * self.counted(layers)).sum(axis=1)
            of_stages = of_parts.reshape(len(of_parts), -1, self.stages, layers.shape[1]).sum(axis=1)
            return np.asarray(np.all(of_stages <= FULL, axis=(0, 1)))
        fitting: NDArray[np.bool_] = np.all(self.held(layers) <= self.capacity, axis=0)
        if self.shares is not None:
            taken = (self.shares * layers).reshape(len(self.shares), -1, self.stages, layers.shape[1]).sum(axis=1)
            fitting &= np.all(taken <= FULL, axis=(0, 1))
        return fitting

    def iteration(self, layers: Layers, limit: Floats | None = None) -> Floats:
        """[pipelines]: seconds of an iteration, once the first one is over; see `parts`.

        What is not below its `limit` may come out too low, but not below the limit.
        """
        counted = self.counted(layers)
        held = self._of_stages(counted)
        times, exposed = self._times(layers, counted, held), self.exposed(held)
        matters = None if limit is None else lambda done: self._summed(done + exposed)[1] < limit
        return self._summed(self._done(times, layers, matters) + exposed)[1]

    def parts(self, layers: Layers) -> Parts:
        """An iteration, from the moment at which all ranks know the norm of the gradient, where they wait for each
        other, to the same moment of the next one: each stage steps its optimizer, goes through the schedule, sums
        its gradients; then first and last stage sum the embedding's.
        """
        counted = self.counted(layers)
        held = self._of_stages(counted)
        times = self._times(layers, counted, held)
        done = self._done(times, layers)
        last = done.max(axis=0)
        all_summed, total = self._summed(done + self.exposed(held))
        return Parts(
            total=total,
            pipeline=last,
            sums=all_summed - last,
            embedding=total - all_summed,
            optimizer=times.start.max(axis=0),
        )

    def _summed(self, own: Floats) -> tuple[Floats, Floats]:
        """[pipelines]: when all stages have summed their gradients, which they have at `own` [stages, pipelines]; and
        when the embedding's are summed, too."""
        all_summed = own.max(axis=0)
        return all_summed, np.maximum(all_summed, np.maximum(own[0], own[-1]) + self.embedding)

    def _done(
        self, times: Times, layers: Layers, matters: Callable[[Floats], NDArray[np.bool_]] | None = None
    ) -> Floats:
        """[stages, pipelines]: when the schedule is over, as `fasop.simulation.vectorised.ends` says."""
        if self.blocking:
            return blocking.ends(self.micro_batches, times)
        return ends(self.schedule, self.micro_batches, times, self._traffic(times, layers), matters)

    def exposed(self, held: Layers) -> Floats:
        """[stages, pipelines]: seconds from a stage's last backward pass until its gradients are summed."""
        whole = self.sums.of(held)
        if self.hidden is None:
            return whole
        left: Floats = np.minimum(whole, np.maximum(whole - self.hidden.time.of(held), self.hidden.last))
        return left

    @property
    def least_exposed(self) -> Floats:
        """[stages, pipelines]: what `exposed` is at least."""
        return self.sums.fixed if self.hidden is None else np.minimum(self.sums.fixed, self.hidden.last)

    def _exposed_slopes(self, held: Layers) -> Floats:
        """[stages, pipelines]: seconds that `exposed` gains with a layer."""
        if self.hidden is None:
            return self.sums.layer
        left, whole = self.exposed(held), self.sums.of(held)
        beyond = np.where(left == self.hidden.last, 0.0, self.sums.layer - self.hidden.time.layer)
        slopes: Floats = np.where(left == whole, self.sums.layer, beyond)
        return slopes

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
        counted = self.counted(layers)
        held = self._of_stages(counted)
        after = self.exposed(held)
        after[0] += self.embedding
        after[-1] += self.embedding if self.stages > 1 else 0
        times = self._times(layers, counted, held)
        if self.blocking:
            path = blocking.longest(self.micro_batches, times, after)
        else:
            path = longest(self.schedule, self.micro_batches, times, after, self._traffic(times, layers), known)
        by_stage = path.start * self.optimizer.layer + path.end * self._exposed_slopes(held)
        slopes: Floats = (
            path.forward * self.forward.layer
            + path.backward * self.backward.layer
            + np.tile(by_stage, (self.parts_count // self.stages, 1))
        )
        return slopes, path.total

    def unhidden(self, layers: int) -> Pipelines:
        """The same without anything hidden, where no stage sums for longer, however many of the layers it has."""
        if self.hidden is None:
            return self
        if self.order is not None:
            return replace(self, sums=Linear(fixed=self.least_exposed, layer=0 * self.sums.layer), hidden=None)
        amount = np.arange(layers + 1).reshape(-1, 1, 1)
        exposed = self.exposed(amount)
        slopes = (exposed[1:] - exposed[0]) / amount[1:]
        return replace(self, sums=Linear(fixed=exposed[0], layer=slopes.min(axis=0)), hidden=None)

    def messages(self, layers: Layers) -> tuple[Floats, Floats]:
        """[stages, pipelines] each: `hop` and `occupied` with a partition.

        Of several chunks' messages of a stage the longest one counts.
        """
        if self.order is None:
            return self.hop, self.occupied
        assert self.s_per_byte is not None
        behind = np.cumsum(np.asarray(layers, np.int64), axis=0)
        extra = self.order.extra[behind]
        extra[-1] = 0  # nothing leaves the end of the model
        longer = extra.reshape(-1, self.stages, behind.shape[1]).max(axis=0) * self.s_per_byte
        hop = self.hop + longer
        return hop, hop if self.busy is None else np.minimum(self.busy + longer, hop)

    def _traffic(self, times: Times, layers: Layers) -> Traffic:
        whole = Traffic.whole(times)
        out = whole.one_way_out if self.one_way_out is None else self.one_way_out
        busy = self.messages(layers)[1]
        return Traffic(forward=busy, backward=np.roll(busy, 1, axis=0), one_way_out=out)

    def _times(self, layers: Layers, counted: Layers, held: Layers) -> Times:
        hop = self.messages(layers)[0]
        return Times(
            forward=self.forward.of(counted),
            backward=self.backward.of(counted),
            send_forward=hop,
            send_backward=np.roll(hop, 1, axis=0),
            start=self.optimizer.of(held),
        )


def joined(several: Sequence[Pipelines]) -> Pipelines:
    """One after another; of the same sizes and schedule, on nodes with the same numbers of GPUs."""
    by_column = [field.name for field in fields(Pipelines) if field.name not in ("one_way_out", "order")]
    return replace(several[0], **{name: _joined([getattr(one, name) for one in several]) for name in by_column})


def _joined(values: Sequence[Any]) -> Any:
    """Arrays [..., pipelines], or what is made of such; of anything else, which all have in common, the first."""
    match values[0]:
        case np.ndarray():
            return np.concatenate(values, axis=-1)
        case Linear() | Hidden() as first:
            parts = {name: _joined([getattr(value, name) for value in values]) for name in vars(first)}
            return replace(first, **parts)
        case first:
            return first
