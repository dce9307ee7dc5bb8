"""What is proved of plans that were found: how much faster other layers per stage could make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from conf.schema.partition import Partition
from fasop.partition.exact import proved
from fasop.search.progress import Told, nobody
from fasop.search.search import Plan, by_time

BOXES = (200, 0)
"""Boxes that are halved, at most: for the first plan, and for every other one."""
PASSES = 2**13
"""Of parts with micro-batches: of a plan with more, which takes longer to simulate, only the first one is proved."""


def prove(plans: Sequence[Plan], told: Told = nobody) -> list[Plan]:
    """The same plans with tighter bounds, and with better partitions where such were found; the best first."""
    found = []
    for number, plan in enumerate(plans):
        small = plan.pipelines.parts_count * plan.pipelines.micro_batches <= PASSES
        found.append(_proved(plan, BOXES[number > 0]) if small or number == 0 else plan)
        told((number + 1) / len(plans))
    return sorted(found, key=by_time)


def _proved(plan: Plan, boxes: int) -> Plan:
    layers = Partition.parse(str(plan.parallel.partition)).layers
    proof = proved(plan.pipelines, sum(layers), np.array([layers]).T, boxes)
    parallel = replace(plan.parallel, partition=str(Partition(tuple(proof.partition[:, 0].tolist()))))
    return replace(
        plan,
        training=replace(plan.training, parallel=parallel),
        total=proof.seconds,
        parts=plan.pipelines.parts(proof.partition),
        bound=max(plan.bound, proof.bound),
    )
