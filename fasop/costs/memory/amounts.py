"""What a rank holds, bytes, as amounts that are linear in the layers of its stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from fasop.costs.network.links import Number

GIB = 2**30

WORKSPACE_BYTES = 2 * 8.125 * 2**20
"""cuBLAS's and cuBLASLt's workspaces, which torch allocates for a stream (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

FRAGMENT_BYTES = 375.0 * 2**20
"""Measured with torch 2.14: what the allocator holds and does not use at the peak, beyond the size of a gradient of all
words; the most in 34 ranks of 20 runs (GPT-2 of 124M and 355M, Llama of 1B and 7B), rounded up."""


@dataclass(frozen=True, kw_only=True)
class Amount(Generic[Number]):
    """Bytes: of every layer, and what is there with none."""

    layer: Number
    fixed: Number
    spared: Spared[Number] | None = None

    def of(self, layers: int) -> Number:
        whole = self.fixed + layers * self.layer
        if self.spared is None:
            return whole
        beyond = self.spared.beyond if layers > self.spared.most else 0.0
        return whole - min(layers, self.spared.most) * self.spared.layer - beyond


@dataclass(frozen=True, kw_only=True)
class Spared(Generic[Number]):
    """Bytes that a stage does not need because some of its layers are computed again, if not all of them are."""

    most: int
    """Layers of a stage that are computed again, if it has as many."""
    layer: Number
    """For each of these."""
    beyond: Number
    """Where a stage has more layers: these are gone before a layer is computed again, which then adds nothing to the
    most that is there."""


@dataclass(frozen=True, kw_only=True)
class StageMemory(Generic[Number]):
    """What a rank of one stage holds, or of each of several."""

    weights: Amount[Number]
    gradients: Amount[Number]
    optimizer: Amount[Number]
    """Master weights, moments and the average of the weights."""
    activations: Amount[Number]
    """Activations of all micro-batches in flight."""
    buffers: Amount[Number]
    """Messages, cuBLAS's workspaces, and what is there for a moment only."""
    fragments: Amount[Number]
    """What torch's allocator holds and does not use."""
    communicators: Amount[Number] | None = None
    """NCCL's buffers; as the next one, known of a stage on its GPUs (`fasop.costs.memory.allowance`)."""
    context: Amount[Number] | None = None
    """CUDA's."""

    def by_term(self) -> dict[str, Amount[Number]]:
        """Every known amount by its name."""
        return {name: amount for name, amount in vars(self).items() if amount is not None}

    @property
    def layer(self) -> Number:
        """Return what a layer takes that is not computed again, unless all are."""
        return reduce(add, (amount.layer for amount in self.by_term().values()))

    @property
    def fixed(self) -> Number:
        return reduce(add, (amount.fixed for amount in self.by_term().values()))

    def of(self, layers: int) -> Number:
        return reduce(add, (amount.of(layers) for amount in self.by_term().values()))

    def capacity(self, memory_gib: Number) -> NDArray[np.int64]:
        """The most layers that fit into so much memory; negative if not even a stage without layers does."""
        room, spared = memory_gib * GIB - self.fixed, self.activations.spared
        if spared is None:
            return most_layers(room, self.layer)
        least = np.minimum(most_layers(room, self.layer - spared.layer), spared.most)
        beyond = most_layers(room + spared.most * spared.layer + spared.beyond, self.layer)
        return least + (beyond > spared.most) * (beyond - least)


def most_layers(room: Number, layer: Number) -> NDArray[np.int64]:
    """How many layers of so many bytes each have room; negative if none has. Weights that replicas share out and
    activations that are offloaded, or gone by the fullest moment, leave a layer no byte."""
    return np.floor(room / np.maximum(layer, 1.0)).astype(np.int64)


EACH_STREAM = ("gradients", "buffers", "fragments")
"""Terms of a `StageMemory`, of which every stream of a rank has its own."""


def memory_of_streams(one: StageMemory[float], streams: int) -> StageMemory[float]:
    """Work out the memory of a rank with so many copies of the model, which hold activations of as many micro-batches
    (`one` has these): each has gradients and buffers of its own, and blocks of the allocator, which gives none to
    another stream.
    """

    def of_all(amount: Amount[float]) -> Amount[float]:
        return Amount(layer=streams * amount.layer, fixed=streams * amount.fixed)

    several = {name: of_all(amount) for name, amount in one.by_term().items() if name in EACH_STREAM}
    return replace(one, **several)
