"""Weights, gradients and optimizer state of a rank, bytes, of which replicas may keep shares; on unlike GPUs in
proportion to the memory that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conf.schema.engine import EngineKind
from fasop.costs.measured_module import MeasuredModule
from fasop.costs.network.links import Number
from fasop.costs.overlap import LARGE_PARTS
from fasop.costs.sizes import head_parameters, word_parameters
from fasop.costs.training import Training
from megatron_ext.contract.parallel_config import BUCKET_BYTES, BUCKETS_UNDER_WAY, PIECE, SLOTS
from megatron_ext.contract.train_config import Precision


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes that one parameter takes."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def all(self) -> float:
        return self.weight + self.gradient + self.optimizer


def parameter_bytes(training: Training, part: float | None = None) -> ParameterBytes:
    """What is kept for every parameter, by a rank that keeps such a part of what its replicas share out; None: all of
    them keep as much.

    tdpp's engine keeps 16-bit weights, gradients in fp32 and an optimizer with its moments, the average of the weights
    and fp32 master weights, which in fp32 are the weights themselves unless the optimizer is sharded. Megatron-Core's
    sharded optimizer has no copy of weights in fp32 either. Megatron-LM:
    docs/source/api-guide/dist_optimizer.md, where fp16 has 16-bit gradients and an fp32 copy of them, 20 bytes in all.
    """
    precision, sharded = training.precision, training.parallel.sharded_optimizer
    kept = 4.0 * training.kept_values
    part = 1 / training.parallel.data if part is None else part
    gradient, state = 4.0, kept if precision is Precision.fp32 else kept + 4.0
    if training.megatron_lm:
        if precision is Precision.fp16:
            gradient, state = 2.0, 16.0
    else:
        state = kept + 4.0 if sharded and training.engine.kind is EngineKind.tdpp else state
        if training.scatters:
            gradient *= part
        elif training.parallel.data > 1 and training.reduced_bytes < gradient:
            gradient += training.reduced_bytes  # copies of the buckets, until the last one is summed
    weight = training.width * (part if training.gathers else 1.0)
    if training.gathers and precision is Precision.fp32:
        state -= 4.0  # the share of the weights is what the optimizer steps
    if training.offloads:
        state = 0.0
    return ParameterBytes(weight=weight, gradient=gradient, optimizer=state * (part if sharded else 1.0))


def pieces_bytes(training: Training) -> float:
    """Count the bytes in which an offloaded optimizer's state passes through a GPU."""
    return 4.0 * SLOTS * PIECE * training.offloaded_values if training.offloads else 0.0


def scattered_bytes(training: Training, first: Number, last: Number, largest: float) -> Number:
    """Count the bytes of gradients that are summed, or wait for it, where a rank keeps the sums of its share alone:
    those of the buckets under way, and of the one that is filled. Of words they are a bucket by themselves: there while
    those of layers are summed, where they are tied in one stage, and at one end of the pass of a stage that has them
    alone; where stages share them, always, until the iteration ends. Those of a stage with both ends, untied, are under
    way together: of the embedding from one micro-batch, and of the head from the next one.

    `largest` are the parameters of the largest layer.
    """
    if not training.scatters:
        return 0.0 * first
    each = max(float(BUCKET_BYTES), 4.0 * largest / LARGE_PARTS)
    layers = (BUCKETS_UNDER_WAY + 1) * each
    if isinstance(training.model, MeasuredModule):
        return layers + 0.0 * first
    model, tensor, several = training.model, training.parallel.tensor_size, training.parallel.pipeline > 1
    words = 4.0 * word_parameters(model, tensor)
    tied = head_parameters(model, tensor, own_word=False) < head_parameters(model, tensor, own_word=True)
    both = not tied and not several and training.parallel.micro_batches > 1
    at_ends = words if tied else (1 + both) * max(0.0, words - each)
    return layers + (np.maximum(first, last) if several else 1.0) * at_ends + 0.0 * first


def gathered_bytes(training: Training, first: Number, last: Number, largest: float) -> Number:
    """Count the bytes of whole weights that are there beside a rank's share: those of two neighbouring blocks. Words
    are a block's, or a whole copy is always there where stages share them.

    `largest` are the parameters of the largest layer.
    """
    if not training.gathers:
        return 0.0 * first
    layer = training.width * largest
    if isinstance(training.model, MeasuredModule):
        return 2 * layer + 0.0 * first
    model, tensor, several = training.model, training.parallel.tensor_size, training.parallel.pipeline > 1
    words = float(training.width * word_parameters(model, tensor))
    tied = head_parameters(model, tensor, own_word=False) < head_parameters(model, tensor, own_word=True)
    if tied and several:
        whole: Number = 2 * layer + np.maximum(first, last) * words
    else:
        whole = 2 * layer + (np.maximum(first, last) if several else 1.0) * max(0.0, words - layer) + 0.0 * first
    return whole


MOST = 2**14
"""What the proportions of a stage add up to at most: each bucket of weights is filled up to a multiple of it, 64 KiB of
gradients where a bucket has 16 MiB."""
FINEST = 256
"""Times the replicas: what the largest of them is at most."""


def proportions(rooms: Sequence[float]) -> list[int]:
    """Returns whole numbers in proportion to the bytes that each replica has room for, the smallest such; none is 0.

    All but the largest are rounded down, for what is left over is least where there is most room.
    """
    most, replicas = max(rooms), len(rooms)
    if most <= 0 or min(rooms) == most:
        return [1] * replicas
    finest = max(1, min(FINEST * replicas, MOST // replicas))
    found = [max(1, math.floor(finest * max(0.0, room) / most)) for room in rooms]
    return [number // math.gcd(*found) for number in found]


def slack(replicas: int) -> float:
    """Return the part of what a stage shares out that a replica may have beyond its own because of that rounding."""
    return 1 / min(FINEST, MOST / replicas**2)
