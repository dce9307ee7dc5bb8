"""How many layers stages have room for, and what shares of their room layers take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.costs.memory.amounts import GIB, StageMemory, most_layers
from fasop.costs.memory.shared_state import slack
from fasop.costs.memory.stages import stage_memory
from fasop.costs.schedules import chunks_in_flight
from fasop.costs.training import Training


def together(training: Training, rooms_gib: Sequence[Floats], least_gib: Floats) -> tuple[Integers, Floats | None]:
    """Do as `alone` where replicas share out by memory: what they share fits if it fits into what all else leaves of
    their GPUs together, and all else must fit into the smallest. Of each stage, `rooms_gib` are [replicas, pipelines].
    """
    replicas = training.parallel.data
    mean_gib = np.stack([one.mean(axis=0) for one in rooms_gib])
    shared, shares = alone(training, mean_gib, (1 + replicas * slack(replicas)) / replicas)
    else_alone, _ = alone(training, least_gib, 0.0)
    return np.minimum(shared, else_alone), shares


def alone(training: Training, memory_gib: Floats, part: float | None = None) -> tuple[Integers, Floats | None]:
    """Return the most layers of each stage and, of several chunks, the `Pipelines.shares` of its memory. Of what
    replicas share out a rank keeps such a `part`; None: all keep as much.

    Layers are as evenly shared by the chunks as they can, the first ones having one more.
    """
    parallel, layers, chunks = training.parallel, training.blocks.layers, training.parallel.chunks
    stages = np.arange(float(parallel.pipeline)).reshape(-1, 1)
    if not training.blocks.alike:
        return _by_kind(training, memory_gib, stages, part)
    if part not in training.known_memory:
        held = None
        if chunks > 1:
            every = chunks_in_flight(parallel.schedule, parallel.pipeline, parallel.micro_batches, chunks)
            held = every[..., np.newaxis].astype(float)
        training.known_memory[part] = stage_memory(training, stages, held, part=part)
    memory: StageMemory[Floats] = training.known_memory[part]
    if chunks == 1:
        return memory.capacity(memory_gib), None
    room = memory_gib * GIB - memory.fixed
    even = (np.arange(layers + 1)[:, np.newaxis] + chunks - 1 - np.arange(chunks)) // chunks
    taken = np.einsum("lc,mcs->lms", even, memory.layer[..., 0]).max(axis=1)
    capacity = [np.searchsorted(of, free, side="right") - 1 for of, free in zip(taken.T, room, strict=True)]
    shares = memory.layer / np.where(room > 0, room, np.nan)
    return np.array(capacity), shares.reshape(len(memory.layer), -1, room.shape[1])


def _by_kind(training: Training, memory_gib: Floats, stages: Floats, part: float | None) -> tuple[Integers, Floats]:
    """Do as `alone`, for the smallest kind of layer; the shares are [moments, kinds, parts, pipelines]."""
    parallel, kinds = training.parallel, range(len(training.blocks.kinds))
    held = None
    if parallel.chunks > 1:
        every = chunks_in_flight(parallel.schedule, parallel.pipeline, parallel.micro_batches, parallel.chunks)
        held = every[..., np.newaxis].astype(float)
    memory = [stage_memory(training, stages, held, kind, part=part) for kind in kinds]
    room = memory_gib * GIB - memory[0].fixed
    free = np.where(room > 0, room, np.nan)
    shares = np.stack([np.broadcast_to(one.layer / free, (*one.layer.shape[:-1], free.shape[-1])) for one in memory])
    whole = np.moveaxis(shares.reshape(len(kinds), -1, parallel.virtual_stages, free.shape[-1]), 0, 1)
    lightest = np.min([one.layer.reshape(-1, parallel.pipeline, 1).max(axis=0) for one in memory], axis=0)
    return most_layers(room, lightest), whole
