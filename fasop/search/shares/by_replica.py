"""Plans whose replicas lie on unlike nodes, as each of them has it.

A search takes every stage to be as slow as its slowest GPU. That is exact where one replica has the slowest GPUs of all
stages; else the plan takes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fasop.search.lower_bound import LowerBounds, Way
from fasop.search.plan import Plan
from fasop.simulation.iteration import GRADIENTS, NORM
from fasop.simulation.loaded import Parts
from fasop.simulation.predict import Prediction, predict_plan


def exact(plans: Sequence[Plan]) -> list[Plan]:
    """The same plans, with the times of each replica where these are unlike."""
    return [_by_replica(plan) if plan.unlike_replicas else plan for plan in plans]


def _by_replica(plan: Plan) -> Plan:
    predicted, parallel = predict_plan(plan), plan.parallel
    counts = [node.name for node in plan.nodes]
    kinds = [replace(kind, group=replace(kind.group, count=counts.count(kind.name))) for kind in plan.kinds]
    way = Way(parallel.schedule, parallel.chunks, parallel.recompute)
    least = float(LowerBounds(kinds).of([plan.training], way, kinds)[0])
    seconds = predicted.iteration_s
    return replace(plan, total=seconds, parts=parts(predicted), bound=min(plan.bound, least, seconds))


def parts(predicted: Prediction) -> Parts:
    """Where the time of an iteration goes; arrays of one."""
    ends = {name: [event.end for event in predicted.events if event.kind == name] for name in (GRADIENTS, NORM)}
    computed = max(event.end for event in predicted.events if event.micro_batch >= 0)
    summed = max([computed, *ends[GRADIENTS]])
    known = max(ends[NORM])
    seconds = {
        "total": predicted.iteration_s,
        "pipeline": predicted.iteration_s - (known - computed),
        "sums": summed - computed,
        "embedding": known - summed,
        "optimizer": max(predicted.durations.optimizer),
    }
    return Parts(**{name: np.array([value]) for name, value in seconds.items()})
