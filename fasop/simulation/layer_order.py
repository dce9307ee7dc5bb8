"""The layers of a model in their order, where they are of several kinds or messages differ with the place of a cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasop.costs.arrays import Floats, Integers


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
        found: Integers = behind
        return found

    def extra_of_stages(self, partitions: Integers, stages: int) -> Floats:
        """[stages, partitions]: bytes by which the messages that leave a stage are longer. Of several chunks' messages
        the longest one counts."""
        extra = self.extra[np.cumsum(partitions, axis=0)]
        extra[-1] = 0  # nothing leaves the end of the model
        longest: Floats = extra.reshape(-1, stages, partitions.shape[1]).max(axis=0)
        return longest
