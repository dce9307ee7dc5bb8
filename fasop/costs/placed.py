"""Where the stages of a plan lie (`fasop.costs.placement`), as arrays.

What depends on the node's kind is left open, so that one placement serves all orders of nodes with the same numbers of
GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fasop.costs.placement import Use, placed

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Flat lists of nodes; those of item i (a stage, a hop) begin at `starts[i]`. No item is without a node."""

    starts: Integers
    nodes: Integers
    between: Integers
    """1 where the link out of the node is used, 0 where GPUs within it talk."""
    sharing: Integers
    """By how many ranks at the same time."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    stages: Uses
    """The nodes of each stage; `between` and `sharing` mean nothing."""
    hops: Uses
    """From each stage to the next one, and from the last to the first; the way back is the same."""
    one_way_out: NDArray[np.bool_]
    """[stages]: whether messages to both neighbours leave by one link."""
    sums: Uses
    """Gradients of each stage, over its replicas."""
    embedding: Uses
    """One item: between the first and the last stage."""


@lru_cache(maxsize=4096)
def place(gpus_per_node: tuple[int, ...], tensor: int, data: int, pipeline: int) -> Placement:
    """Of `tensor * data * pipeline` ranks, which must be as many as the nodes have GPUs."""
    found = placed(gpus_per_node, tensor, data, pipeline)
    return Placement(
        stages=_uses([[Use(node, 0, 1) for node in nodes] for nodes in found.stages]),
        hops=_uses(found.hops),
        one_way_out=np.array(found.one_way_out),
        sums=_uses(found.sums),
        embedding=_uses([found.embedding]),
    )


def _uses(items: Sequence[Sequence[Use]]) -> Uses:
    flat = np.array([use for item in items for use in item], np.int64)
    return Uses(
        starts=np.cumsum([0, *(len(item) for item in items[:-1])]),
        nodes=flat[:, 0],
        between=flat[:, 1],
        sharing=flat[:, 2],
    )
