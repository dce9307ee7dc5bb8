"""What a rank of a stage holds, in a pipeline without a flush."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fasop.costs.arrays import Floats

Bytes = TypeVar("Bytes", float, Floats)


@dataclass(frozen=True, kw_only=True)
class ExtraMemory:
    """What is there beside a stage's operators: a part of it for each version, that is, mini-batch in flight."""

    once: float = 0.0
    each: float = 0.0


@dataclass(frozen=True, kw_only=True)
class VersionedMemory:
    """Counts bytes of a rank with several versions of its stage's weights, one for each mini-batch in flight."""

    version: float = 1.0
    """Bytes of a version of the weights, for each byte of gradients that are summed."""
    once: float = 2.0
    """Gradients, and the state of SGD with momentum, likewise."""
    received: float | None = None
    """Bytes of a mini-batch that enter a stage but the first; None: what crosses the cut before it."""
    beside: tuple[ExtraMemory, ExtraMemory, ExtraMemory, ExtraMemory] = (ExtraMemory(),) * 4
    """What is kept beside, of a stage between others, the last one, the first one, and the only one."""

    def of(
        self,
        parameters: Bytes,
        activations: Bytes,
        fixed: Bytes,
        sent: Bytes,
        versions: int,
        *,
        first: bool,
        last: bool,
    ) -> Bytes:
        """Count the bytes of stages with so many bytes of gradients, activations of a mini-batch and what has one copy,
        whose cut before them `sent` bytes cross."""
        beside = self.beside[2 * first + last]
        entering = sent if self.received is None else sent * 0.0 + self.received * (not first)
        return (
            parameters * (versions * self.version + self.once)
            + fixed
            + beside.once
            + versions * (activations + entering + beside.each)
        )
