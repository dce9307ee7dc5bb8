"""A model's blocks as costs see them: what a partition counts, of which kinds, in which order, and what the ends have.

A layer is what a partition counts: a block, with those before it that lie wherever it lies. A T5's first decoder layer
has the encoder's final norm and the decoder's embedding with it, so that it is a kind of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from conf.schema.experiment import Model
from fasop.costs.arrays import Integers
from megatron_ext.contract.activations import crossing

Kinds = tuple[str, ...]
"""Of the blocks that lie together."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    first: Kinds
    """What the first stage has beside its layers."""
    last: Kinds
    kinds: tuple[Kinds, ...]
    """Of layers."""
    sequence: tuple[int, ...]
    """Of each layer the number of its kind."""
    crossing: tuple[int, ...]
    """Numbers of a sample that cross a cut behind so many layers, from none to all."""

    @property
    def layers(self) -> int:
        return len(self.sequence)

    @property
    def alike(self) -> bool:
        """Whether all layers and all messages are."""
        return len(self.kinds) == 1 and len(set(self.crossing)) == 1

    @property
    def every_kind(self) -> Kinds:
        """Of blocks, each once."""
        return tuple(dict.fromkeys(kind for part in (self.first, *self.kinds, self.last) for kind in part))

    @cached_property
    def counts(self) -> Integers:
        """[kinds, layers + 1]: how many of each kind are among so many first ones."""
        found = np.zeros((len(self.kinds), self.layers + 1), np.int64)
        found[np.array(self.sequence, np.int64), np.arange(1, self.layers + 1)] = 1
        counted: Integers = np.cumsum(found, axis=1)
        return counted

    def by_kind(self, partition: Sequence[int]) -> list[tuple[int, ...]]:
        """Of each part how many layers of each kind it has."""
        behind = self.counts[:, np.cumsum([0, *partition])]
        return [tuple(part) for part in np.diff(behind, axis=1).T.tolist()]

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
    sized = model.sized(1)
    counted = dict(sized.kinds())
    first: list[str] = []
    waiting: list[str] = []
    kinds: dict[Kinds, int] = {}
    sequence: list[int] = []
    for kind, count in sized.all_kinds():
        if kind not in counted:
            (waiting if sequence else first).extend([kind] * count)
            continue
        for _ in range(count):
            sequence.append(kinds.setdefault((*waiting, kind), len(kinds)))
            waiting = []
    return Blocks(
        first=tuple(first),
        last=tuple(waiting),
        kinds=tuple(kinds),
        sequence=tuple(sequence),
        crossing=tuple(crossing(sized, after) for after in range(len(sequence) + 1)),
    )
