"""Messages of gradients, where links have other figures in their direction than in that of activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasop.costs.arrays import Floats, Integers


@dataclass(frozen=True, kw_only=True)
class Back:
    """Seconds of the shortest messages, [stages, pipelines] each: in row s from stage s + 1 to s, in the last row from
    the first stage to the last."""

    hop: Floats
    """Until the stage has them."""
    busy: Floats
    """For how much of this the link is occupied."""
    s_per_byte: Floats | None = None
    """Of what messages are longer, where they differ."""

    def take(self, columns: Integers) -> Back:
        rate = self.s_per_byte
        return Back(
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
