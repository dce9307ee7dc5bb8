"""Chains of waits that every partition of a pipeline has, and what they take.

In all schedules a stage begins after the first micro-batch's way to it, computes for all micro-batches, and from its
last backward pass the gradient goes the same way back (with `zb_h1`, before the weight gradients that the stage still
owes). Then the first stage still sums its gradients, and then the embedding's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fasop.costs.arrays import Floats, Integers
from fasop.costs.schedules import passes_left
from fasop.simulation.linear import Linear
from fasop.simulation.pipelines import Columns, Pipelines


@dataclass(frozen=True, kw_only=True)
class Chains:
    """What the links of such chains take, by stage."""

    own: Linear
    """A stage's passes from its first one until the last gradient leaves it."""
    way: Linear
    """Its passes for a micro-batch that only goes through it, there and back. Of several chunks the first one counts,
    which may have no layer."""
    trip: Linear
    """Its passes for the first micro-batch, in all its chunks."""
    hops: Floats
    """[pipelines]: the messages of that micro-batch, through all parts and back."""
    left: Linear
    """Its passes from the first gradient that leaves it until the last one. Of several chunks, a layer of that one
    counts which has the shortest passes left."""
    turn: Linear | None
    """[parts, pipelines]: with several chunks, the backward passes of one of them that follow its first one in turn."""
    of_part: Linear | None
    """[parts, pipelines]: with several chunks these, and of what the stage has left after that for each chunk as much
    as is left of every one: a mean over all parts, not what any part takes.
    """


def chains_of(pipelines: Pipelines) -> Chains:
    schedule, stages, count = pipelines.schedule, pipelines.stages, pipelines.micro_batches
    forward, backward, hop = pipelines.forward, pipelines.backward, pipelines.mean_hop
    chunks = pipelines.parts_count // stages
    own, way = own_and_way(pipelines)
    whole = [by_stage(passes, stages) for passes in (forward, backward)]
    left = passes_left(schedule, stages, chunks, count)
    ahead, back = (passes.reshape(-1, 1) for passes in (left.forward, left.backward))
    of_parts = weighted(ahead, forward, back, backward)
    turns = schedule.definition.in_turn(stages, count)
    return Chains(
        own=own,
        way=way,
        trip=weighted(1.0, whole[0], _waited(pipelines)[:stages], whole[1]),
        hops=2 * (chunks * hop.sum(axis=0) - hop[-1]),
        left=Linear(
            fixed=of_parts.fixed.reshape(chunks, stages, -1).sum(axis=0),
            layer=of_parts.layer.reshape(chunks, stages, -1).min(axis=0),
        ),
        turn=weighted(0.0, forward, turns - 1.0, backward) if chunks > 1 else None,
        of_part=_of_part(pipelines, chunks) if chunks > 1 else None,
    )


def own_and_way(pipelines: Pipelines) -> tuple[Linear, Linear]:
    """`Chains.own` and `Chains.way`."""
    forward, backward, stages, count = pipelines.forward, pipelines.backward, pipelines.stages, pipelines.micro_batches
    number, half = np.arange(float(stages)).reshape(-1, 1), pipelines.schedule.definition.input_share
    owed = np.where(number > 0, np.minimum(number + 1, count), 0) * (1 - half)
    way = weighted(1.0, forward, _waited(pipelines), backward)
    alone = pipelines.parts_count == stages
    return (
        weighted(count, by_stage(forward, stages), count - owed, by_stage(backward, stages)),
        Linear(fixed=way.fixed[:stages], layer=way.layer[:stages] if alone else 0 * pipelines.hop),
    )


def _waited(pipelines: Pipelines) -> Floats:
    """[parts, 1]: the part of a backward pass that others wait for; of its last micro-batch, the first stage has the
    weight gradient before its sums."""
    waited = np.full((pipelines.parts_count, 1), pipelines.schedule.definition.input_share)
    waited[0] = 1.0
    return waited


def with_one_more(pipelines: Pipelines, partitions: Integers) -> Callable[[Integers], Floats]:
    """Bounds partitions in which one layer has gone from a part to another one: gets pairs of parts [pairs, 2], from
    which to which, whose stages differ, and returns [pipelines, pairs] seconds below which none is.

    The stage that has one more layer begins after the first micro-batch's way to it, and after its last backward pass
    the gradient goes the same way back.
    """
    every: list[tuple[Pipelines, Columns]] = [(pipelines, slice(None))]
    every += [(one.lines, one.of) for one in pipelines.replicas]
    terms = [_until_done(lines, partitions[:, of]) for lines, of in every]

    def least(pairs: Integers) -> Floats:
        source, target = (pairs % pipelines.stages).T
        before = (source < target)[:, np.newaxis]
        seconds = [(done[target] - np.where(before, way[source], 0.0)).T for done, way in terms]
        found: Floats = seconds[0]
        for one in pipelines.replicas:  # what they take counts where they differ
            found[one.of] = 0.0
        for one, own in zip(pipelines.replicas, seconds[1:], strict=True):
            np.maximum.at(found, one.of, own)
        return found

    return least


def _until_done(pipelines: Pipelines, partitions: Integers) -> tuple[Floats, Floats]:
    """[stages, pipelines]: the end of an iteration at least, by each stage's chain, if it has one more layer; and what
    a layer of a stage that comes before takes of it."""
    held, (own, way) = pipelines.held(partitions), own_and_way(pipelines)
    passed = way.of(held) + 2 * pipelines.mean_hop
    ending = pipelines.optimizer.fixed[0] + pipelines.least_exposed[0] + pipelines.embedding
    done: Floats = np.cumsum(passed, axis=0) - passed + own.of(held + 1) + ending
    return done, way.layer


def _of_part(pipelines: Pipelines, chunks: int) -> Linear:
    """See `Chains.of_part`. The largest part's passes in turn, and after them the largest stage's passes left, are at
    least their means with the same weights, if a stage has those of all its chunks, which are alike.
    """
    schedule, stages, count = pipelines.schedule, pipelines.stages, pipelines.micro_batches
    turns = schedule.definition.in_turn(stages, count)
    left = passes_left(schedule, stages, chunks, count, turns)
    forward, backward = left.forward.min(axis=0).reshape(-1, 1), left.backward.min(axis=0).reshape(-1, 1)
    layer = forward * pipelines.forward.layer[:stages] + backward * pipelines.backward.layer[:stages]
    whole = (turns - 1) * pipelines.backward.layer + np.tile(chunks * layer, (chunks, 1))
    return Linear(fixed=np.zeros_like(whole), layer=whole)


def weighted(forwards: Floats | float, forward: Linear, backwards: Floats | float, backward: Linear) -> Linear:
    return Linear(
        fixed=forwards * forward.fixed + backwards * backward.fixed,
        layer=forwards * forward.layer + backwards * backward.layer,
    )


def both_passes(pipelines: Pipelines) -> Linear:
    """[stages, pipelines]: what a stage computes for a micro-batch, in all its chunks."""
    forward, backward = (by_stage(passes, pipelines.stages) for passes in (pipelines.forward, pipelines.backward))
    return Linear(fixed=forward.fixed + backward.fixed, layer=forward.layer + backward.layer)


def by_stage(passes: Linear, stages: int) -> Linear:
    """[stages, pipelines], from [parts, pipelines]: of all chunks, whose layers take the same."""
    if len(passes.fixed) == stages:
        return Linear(fixed=passes.fixed, layer=passes.layer)
    fixed: Floats = passes.fixed.reshape(-1, stages, passes.fixed.shape[1]).sum(axis=0)
    return Linear(fixed=fixed, layer=passes.layer[..., :stages, :])
