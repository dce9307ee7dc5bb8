"""Tighter bounds of plans that were found, by proofs that may come upon better partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from conf.schema.values.partition import Partition
from fasop.search.plan import Fault, Plan, by_time, no_fault
from fasop.search.search import ShowProgress, no_progress
from fasop.simulation.pipelines import Pipelines

BOXES = (200, 0)
"""Boxes that a proof halves, at most: for the first plan, and for every other one."""
PASSES = 2**13
"""Parts times micro-batches of a plan; of one with more, which takes longer to simulate, only the first one is
proved."""


def prove(
    plans: Sequence[Plan], progress: ShowProgress = no_progress, fault: Fault = no_fault, boxes: int = BOXES[0]
) -> list[Plan]:
    """The same plans with tighter bounds, and with better partitions where such were found; the best first. Of the
    first one so many boxes are looked at."""
    found = []
    for number, plan in enumerate(plans):
        lines = plan.pipelines
        small = lines is not None and lines.parts_count * lines.micro_batches <= PASSES
        can = lines is not None and (small or number == 0)
        better = _proved(plan, lines, BOXES[1] if number else boxes) if lines is not None and can else plan
        found.append(better if fault(better) is None else plan)
        progress((number + 1) / len(plans))
    return sorted(found, key=by_time)


def has_boxes(plan: Plan) -> bool:
    """Whether more boxes prove more of it: not where layers differ."""
    return plan.pipelines is not None and plan.pipelines.order is None


def _proved(plan: Plan, lines: Pipelines, boxes: int) -> Plan:
    from fasop.partition.exact import proved  # most first plans are close to their bounds

    layers = plan.partition.layers
    proof = proved(lines, sum(layers), np.array([layers]).T, boxes, least=plan.bound)
    partition = Partition(tuple(proof.partition[:, 0].tolist()))
    parallel = replace(plan.training.parallel, partition=partition.layers)
    return replace(
        plan,
        training=replace(plan.training, parallel=parallel),
        partition=partition,
        total=proof.seconds,
        known_parts=lines.parts(proof.partition),
        bound=max(plan.bound, proof.bound),
    )
