"""A model's blocks as costs see them: what a partition counts, of which kinds, in which order, and what the ends have.

A layer is what a partition counts: a block, with those before it that lie wherever it lies. A T5's first decoder layer
has the encoder's final norm and the decoder's embedding with it, so that it is a kind of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from conf.schema.model import Model
from fasop.costs.arrays import Integers
from fasop.costs.measured_module import MeasuredModule
from megatron_ext.contract.models.counts import crossing

Kinds = tuple[str, ...]
"""Kinds of the blocks that lie together. In the place of its kind, a block of a user's module has the name of the first
one that costs the same."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    first: Kinds
    """What the first stage has beside its layers."""
    last: Kinds
    kinds: tuple[Kinds, ...]
    """The kinds of layers."""
    sequence: tuple[int, ...]
    """The number of each layer's kind."""
    crossing: tuple[int, ...]
    """Numbers of a sample that cross a cut behind so many layers, from none to all; of a user's module the bytes of the
    smallest micro-batch that was measured."""
    names: tuple[str, ...] = ()
    """Names of layers, where they have names that their owner knows."""

    @property
    def layers(self) -> int:
        return len(self.sequence)

    @property
    def most_stages(self) -> int:
        """That have anything to do."""
        return self.layers + bool(self.first) + bool(self.last)

    @property
    def alike(self) -> bool:
        """Whether all layers and all messages are."""
        return len(self.kinds) == 1 and len(set(self.crossing)) == 1

    @property
    def every_kind(self) -> Kinds:
        """List the kinds of all blocks, each once."""
        return tuple(dict.fromkeys(kind for part in (self.first, *self.kinds, self.last) for kind in part))

    @cached_property
    def counts(self) -> Integers:
        """[kinds, layers + 1]: how many of each kind are among so many first ones."""
        found = np.zeros((len(self.kinds), self.layers + 1), np.int64)
        found[np.array(self.sequence, np.int64), np.arange(1, self.layers + 1)] = 1
        return np.cumsum(found, axis=1)

    def by_kind(self, partition: Sequence[int]) -> list[tuple[int, ...]]:
        """Count the layers of each kind in each part."""
        behind = self.counts[:, np.cumsum([0, *partition])]
        return [tuple(part) for part in np.diff(behind, axis=1).T.tolist()]

    def contents(self, partition: Sequence[int]) -> list[str]:
        """Say in words which layers each part has: how many, by kind where there are several, or by their names."""
        if not self.names:
            return [self.named(counts) for counts in self.by_kind(partition)]
        ends = np.cumsum([0, *partition]).tolist()
        return [_from_to(self.names[begin:end]) for begin, end in pairwise(ends)]

    def named(self, counts: tuple[int, ...]) -> str:
        """So many layers of each kind, in words: `4 encoder + 2 decoder`; where all are alike the number alone."""
        names: dict[str, int] = {}
        for kinds, count in zip(self.kinds, counts, strict=True):
            names[kinds[-1]] = names.get(kinds[-1], 0) + count
        if len(names) == 1:
            return str(sum(counts))
        return " + ".join(f"{count} {name}" for name, count in names.items() if count) or "0"


@lru_cache(maxsize=256)
def blocks_of(model: Model) -> Blocks:
    if isinstance(model, MeasuredModule):
        return _of_module(model)
    sized = model.sized(1)
    counted = dict(sized.kinds())
    places: list[tuple[str, str | None]] = []
    before = "first"
    for kind, count in sized.all_kinds():
        places += [(kind, None if kind in counted else before)] * count
        before = "next" if kind in counted else before
    return _laid_out(places, [crossing(sized, after) for after in range(sized.counted + 1)], ())


def _of_module(model: MeasuredModule) -> Blocks:
    alike: dict[object, str] = {}
    places = []
    for block, *others in zip(model.sequence, *(one.sequence for one in model.groups.values()), strict=True):
        costs = tuple((one.kind, one.parameters, one.fixed_bytes, one.kept, one.given) for one in others)
        places.append((alike.setdefault(costs, block.name), block.held))
    names = tuple(block.name for block in model.sequence if block.held is None)
    return _laid_out(places, [values[0] for values in model.crossing], names)


def _laid_out(places: Sequence[tuple[str, str | None]], crosses: Sequence[int], names: tuple[str, ...]) -> Blocks:
    """Lay out all blocks in their order, given their kinds and where each lies, which is None for a layer. What follows
    the last layer lies on the last stage."""
    first: list[str] = []
    last: list[str] = []
    waiting: list[str] = []
    kinds: dict[Kinds, int] = {}
    sequence: list[int] = []
    for kind, held in places:
        waiting.append(kind)
        if held is None:
            sequence.append(kinds.setdefault(tuple(waiting), len(kinds)))
        elif held != "next":
            (first if held == "first" else last).extend(waiting)
        waiting = waiting if held == "next" else []
    last += waiting
    return Blocks(
        first=tuple(first),
        last=tuple(last),
        kinds=tuple(kinds),
        sequence=tuple(sequence),
        crossing=tuple(crosses),
        names=names,
    )


def _from_to(names: Sequence[str]) -> str:
    """Blocks by their names: `conv`, `conv, norm`, or `conv … head (5)`."""
    if len(names) <= 2:
        return ", ".join(names) or "-"
    return f"{names[0]} … {names[-1]} ({len(names)})"
