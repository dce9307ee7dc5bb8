"""The replicas of a plan, each with its own GPUs and its own number of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fasop.costs.training import PlacedTraining
from fasop.simulation.iteration import Durations
from megatron_ext.contract.schedules import as_json, schedule


class Pipeline(NamedTuple):
    """What some replicas do alike in an iteration, and what it takes them."""

    schedule: Mapping[str, Any]
    """Actions, as in docs/formats.md."""
    durations: Durations


def unlike(plan: PlacedTraining, whole: Durations, alone: Mapping[str, Durations]) -> list[Pipeline]:
    """The pipelines of a plan, each kind once, that of the first replica first.

    `whole` and `alone` are as in `of_replicas`.
    """
    parallel = plan.training.parallel
    found: dict[tuple[int, int], Pipeline] = {}
    for durations, count in zip(of_replicas(plan, whole, alone), parallel.micro_batches_of, strict=True):
        if (id(durations), count) not in found:
            lists = schedule(str(parallel.schedule), parallel.pipeline, parallel.chunks, count)
            found[id(durations), count] = Pipeline(as_json(lists, parallel.chunks, count), durations)
    return [*found.values()]


def of_replicas(plan: PlacedTraining, whole: Durations, alone: Mapping[str, Durations]) -> list[Durations]:
    """What each replica takes: its own GPUs' time to compute and to step, and of all else, which replicas do together
    or over links that they share, what the stage takes. Replicas that take the same share an object.

    `whole` is what the stages take, by the slowest of their GPUs; `alone`, by kind of node, what they would take on
    nodes of that kind alone.
    """
    known: dict[tuple[str, ...], Durations] = {}
    found = []
    for kinds in _kinds(plan):
        if kinds not in known:
            own = [alone[kind] for kind in kinds]
            steps = [one.optimizer[stage] - one.weights[stage] for stage, one in enumerate(own)]
            known[kinds] = replace(
                whole,
                times=[
                    replace(sends, forward=one.times[stage].forward, backward=one.times[stage].backward)
                    for stage, (one, sends) in enumerate(zip(own, whole.times, strict=True))
                ],
                optimizer=[step + handing for step, handing in zip(steps, whole.weights, strict=True)],
            )
        found.append(known[kinds])
    return found


def _kinds(plan: PlacedTraining) -> Sequence[tuple[str, ...]]:
    """By replica, the kind of node that has it, stage by stage: a tensor group lies in one node."""
    parallel = plan.training.parallel
    groups = [node.name for node in plan.nodes for _ in range(node.gpus // parallel.tensor_size)]
    return [tuple(groups[replica :: parallel.data]) for replica in range(parallel.data)]
