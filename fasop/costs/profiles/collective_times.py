"""Measured times of collectives, as a profile keeps them."""

from __future__ import annotations

import math
from enum import StrEnum, unique

from conf.errors import ConfigError
from conf.schema.values.ranges import MISSING, config


@unique
class Operation(StrEnum):
    """What ranks do together; the values are nccl-tests' names."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    send_recv = "send_recv"
    alltoall = "alltoall"


@config
class CollectiveTimes:
    """Microseconds of one operation of a group of ranks, by bytes.

    Bytes are what nccl-tests calls size: the whole tensor of an all-reduce, an all-gather and a reduce-scatter, all
    that a rank sends in an all-to-all, the message of a send.
    """

    operation: Operation = MISSING
    ranks: int = MISSING
    nodes: int = 1
    """On which the group lies; 1: its messages stay in a node."""
    sharing: int = 1
    """Such groups that used the link of a node at the same time."""
    us_by_bytes: dict[int, float] = MISSING

    @property
    def name(self) -> str:
        """Say which measurement this is: no profile has two of a name."""
        return f"{self.operation} of {self.ranks} ranks on {self.nodes} node{'s' if self.nodes > 1 else ''}"


def check_collectives(every: list[CollectiveTimes]) -> None:
    """Raises ConfigError for the first figure that cannot be."""
    seen = set()
    for one in every:
        what = f"collectives: {one.name}"
        if one.name in seen:
            raise ConfigError(f"{what} occurs twice; keep one of them")
        seen.add(one.name)
        if one.ranks < 2 or not 1 <= one.nodes <= one.ranks or one.sharing < 1:
            raise ConfigError(f"{what}: ranks must be at least 2, nodes from 1 to ranks, sharing={one.sharing} above 0")
        if len(one.us_by_bytes) < 2:
            raise ConfigError(f"{what}: us_by_bytes must have the times of at least two sizes")
        for size, us in one.us_by_bytes.items():
            if not (size > 0 and math.isfinite(us) and us > 0):
                raise ConfigError(f"{what}: us_by_bytes: {size}: {us} must be above 0, both")
