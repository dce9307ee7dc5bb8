"""What stages take, as linear functions of their layers.

Arrays are [stages, pipelines], or [parts, pipelines] where a stage has several parts of the model. Where layers are of
several kinds, a function has a slope for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fasop.costs.arrays import Floats, Integers

Layers = Integers | Floats
"""Partitions: whole numbers, but in a bound also parts of layers."""
TINY = 1e-30
"""Seconds that are none, but may divide."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """What the first layers of a stage, or part, take longer because they are computed again."""

    most: Integers
    """[pipelines], how many of them are."""
    layer: Floats
    """[stages, pipelines], for each of them."""

    @classmethod
    def joined(cls, several: Sequence[Linear]) -> Again | None:
        """Return that of pipelines one after another; None where no layer of any is computed again."""
        if all(one.again is None for one in several):
            return None
        nothing = [cls(most=np.zeros(one.fixed.shape[1], np.int64), layer=np.zeros_like(one.fixed)) for one in several]
        every = [one.again or none for one, none in zip(several, nothing, strict=True)]
        layer = np.concatenate([one.layer for one in every], axis=-1)
        return cls(most=np.concatenate([one.most for one in every]), layer=layer)

    def take(self, columns: Integers) -> Again:
        return Again(most=self.most[columns], layer=self.layer[:, columns])


@dataclass(frozen=True, kw_only=True)
class Linear:
    """What a stage, or a part, takes, [stages, pipelines] each: `fixed + layers * layer`.

    Of layers of several kinds `layer` is [kinds, stages, pipelines], and so are `layers`. Where only some layers are
    computed again, this is not linear in few layers; bounds leave `again` out, and are the lower for it.
    """

    fixed: Floats
    layer: Floats
    again: Again | None = None

    def of(self, layers: Layers) -> Floats:
        if self.again is not None:
            count = layers if self.layer.ndim == self.fixed.ndim else layers.sum(axis=0)
            return replace(self, again=None).of(layers) + np.minimum(count, self.again.most) * self.again.layer
        if self.layer.ndim == self.fixed.ndim:
            return self.fixed + layers * self.layer
        whole: Floats = self.fixed + layers[0] * self.layer[0]
        for number, layer in zip(layers[1:], self.layer[1:], strict=True):
            whole += number * layer
        return whole

    def plus(self, other: Linear) -> Linear:
        """Return the sum of both, neither of which computes layers again."""
        return Linear(fixed=self.fixed + other.fixed, layer=self.layer + other.layer)

    def take(self, columns: Integers) -> Linear:
        again = None if self.again is None else self.again.take(columns)
        return Linear(fixed=self.fixed[:, columns], layer=self.layer[..., columns], again=again)


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What the last backward pass hides of summing the gradients (fasop/costs/overlap.py)."""

    time: Linear
    """The time of the pass after the first bucket was complete; negative where none is."""
    last: Floats
    """[stages, pipelines]: what the last bucket takes, which nothing hides."""
    behind: Linear | None = None
    """Where gradients are summed after each micro-batch: by how much, before the last one, sums fall behind passes;
    negative where they do not. Where weights are gathered for each pass, what passes wait for these."""
    at_turns: Floats | None = None
    """[stages, pipelines]: what a stage that has layers waits for their weights besides, where its passes begin."""

    def take(self, columns: Integers) -> Hidden:
        return Hidden(
            time=self.time.take(columns),
            last=self.last[:, columns],
            behind=None if self.behind is None else self.behind.take(columns),
            at_turns=None if self.at_turns is None else self.at_turns[:, columns],
        )

    @property
    def rows(self) -> list[Floats]:
        """All of these, [stages, pipelines] each and nothing where there is none, for compiled loops: the pass without
        layers, with each, and longer with each that is computed again; the last bucket; what is `behind`, and with each
        layer; `at_turns`."""
        nothing = np.zeros_like(self.last)
        longer = nothing if self.time.again is None else self.time.again.layer
        behind = [nothing] * 2 if self.behind is None else [self.behind.fixed, self.behind.layer]
        at_turns = nothing if self.at_turns is None else self.at_turns
        return [self.time.fixed, self.time.layer, longer, self.last, *behind, at_turns]

    def left(self, sums: Linear, held: Layers) -> Floats:
        """[stages, pipelines]: seconds of the sums that are not hidden; `held` are the layers of each stage."""
        return self._left_of_one(sums, held) + self.beside(held)

    def beside(self, held: Layers) -> Floats:
        """[stages, pipelines]: the part of these that is not the last backward pass's."""
        found = np.zeros_like(self.last)
        if self.behind is not None:
            found = found + np.maximum(0.0, self.behind.of(held))
        if self.at_turns is not None:
            count = held if self.time.layer.ndim == self.time.fixed.ndim else held.sum(axis=0)
            found = found + np.minimum(1, count) * self.at_turns
        return found

    def _left_of_one(self, sums: Linear, held: Layers) -> Floats:
        whole = sums.of(held)
        return np.minimum(whole, np.maximum(whole - self.time.of(held), self.last))

    def slopes(self, sums: Linear, held: Layers) -> Floats:
        """Seconds that `left` gains with a layer, of the shape of `sums.layer`."""
        left, whole = self._left_of_one(sums, held), sums.of(held)
        beyond = np.where(left == self.last, 0.0, sums.layer - self.time.layer)
        slopes = np.where(left == whole, sums.layer, beyond)
        return slopes if self.behind is None else slopes + np.where(self.behind.of(held) > 0, self.behind.layer, 0.0)


@dataclass(frozen=True, kw_only=True)
class BackwardMessages:
    """Seconds of the shortest messages, [stages, pipelines] each: in row s from stage s + 1 to s, in the last row from
    the first stage to the last."""

    hop: Floats
    """Until the stage has them."""
    busy: Floats
    """For how much of this the link is occupied."""
    s_per_byte: Floats | None = None
    """Seconds that each byte adds by which messages are longer, where they differ."""

    def take(self, columns: Integers) -> BackwardMessages:
        rate = self.s_per_byte
        return BackwardMessages(
            hop=self.hop[:, columns],
            busy=self.busy[:, columns],
            s_per_byte=None if rate is None else rate[:, columns],
        )

    def messages(self, extra: Floats | None) -> tuple[Floats, Floats]:
        """`hop` and `busy` of messages that are so many bytes longer, [stages, pipelines]."""
        if extra is None:
            return self.hop, np.minimum(self.busy, self.hop)
        assert self.s_per_byte is not None
        longer = extra * self.s_per_byte
        return self.hop + longer, np.minimum(self.busy, self.hop) + longer


@dataclass(frozen=True, kw_only=True)
class LayerOrder:
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
        return behind

    def extra_of_stages(self, partitions: Integers, stages: int) -> Floats:
        """[stages, partitions]: bytes by which the messages that leave a stage are longer. Of several chunks' messages
        the longest one counts."""
        extra = self.extra[np.cumsum(partitions, axis=0)]
        extra[-1] = 0  # nothing leaves the end of the model
        return extra.reshape(-1, stages, partitions.shape[1]).max(axis=0)
