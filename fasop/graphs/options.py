"""What a division is for: levels of a network, and what divisions may be like."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fasop.costs.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Level:
    machines: int
    bytes_per_s: float


class Sync(StrEnum):
    """What a stage with replicas takes for a mini-batch."""

    sum = "sum"
    """First its operators, then the sum of its gradients."""
    max = "max"
    """The longer of the two: gradients are summed while the next mini-batches are computed."""

    def together(self, compute_s: Floats | float, summing_s: Floats | float) -> Floats:
        return np.add(compute_s, summing_s) if self is Sync.sum else np.maximum(compute_s, summing_s)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The public optimizer's flags, and how gradients are summed."""

    memory_bytes: float | None = None
    """Memory of each machine; None: it does not limit."""
    straight: bool = False
    """No replicas."""
    fewer: bool = False
    """Fewer machines where more are no faster."""
    compression: float | None = None
    """What activations are divided by before they are sent; None: sending them takes no time."""
    sync: Sync = Sync.sum
