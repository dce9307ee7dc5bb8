"""What a search says of itself, line by line: what it looked at, what the best plan gains, and what is proved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from conf.schema.parallel import Parallel
from conf.visible import plural
from fasop.costs import sizes
from fasop.costs.memory.activations import host_bytes
from fasop.costs.memory.amounts import GIB
from fasop.search.inputs import Inputs
from fasop.search.plan import Plan
from fasop.search.search import Coverage
from fasop.search.space import node_orders
from fasop.search.space.candidates import MOST_MICRO_BATCHES
from megatron_ext.contract.parallel_config import Shards

if TYPE_CHECKING:
    from fasop.search.by_stage.look import Looked

OPTIMAL = 1e-5
"""A part of an iteration that nobody could measure."""
MOST_STAGES = 4
"""Stages of which a line has parts."""


def nodes_used(inputs: Inputs, plan: Plan) -> str:
    """That the best plan leaves nodes out, if it does."""
    every = sum(kind.group.count for kind in inputs.kinds)
    if len(plan.nodes) == every:
        return ""
    return f"The first plan uses {len(plan.nodes)} of {every} nodes; leave_out=false shows plans on all of them."


def offloaded(plan: Plan) -> str:
    """What the nodes' memory holds of such plans."""
    training, kept = plan.training, []
    if training.offloads:
        kept.append(f"{_state_bytes(plan) / GIB:.0f} GiB of what the optimizer keeps")
    if training.offloads_activations:
        activations = host_bytes(training, plan.partition.layers)
        kept.append(f"{activations / GIB:.0f} GiB of activations")
    if not kept:
        return ""
    return f"In the first plan the memory of all nodes together has {' and '.join(kept)}."


def _state_bytes(plan: Plan) -> float:
    """Bytes of what the optimizer keeps in the host's memory, over all nodes."""
    training, whole = plan.training, 0.0
    if training.parallel.alike:
        replicas = 1 if training.parallel.sharded_optimizer else training.parallel.data
        return 4.0 * training.offloaded_values * replicas * training.model.parameters()
    for stage, numbers in enumerate(_rank_parameters(plan)):
        one = replace(training, parallel=training.parallel.of_stage(stage))
        copies = one.parallel.tensor_size * (1 if one.parallel.sharded_optimizer else one.parallel.data)
        whole += 4.0 * one.offloaded_values * copies * numbers if one.offloads else 0.0
    return whole


def _rank_parameters(plan: Plan) -> list[float]:
    """Parameters of a rank, by stage."""
    training, tensor, stages = plan.training, plan.training.parallel.tensor_size, plan.training.parallel.pipeline
    of_kinds = np.array(sizes.kind_parameters(training.model, tensor, own_word=stages > 1), float)
    found = (np.array(training.blocks.by_kind(plan.partition.layers)) @ of_kinds).reshape(-1, stages).sum(axis=0)
    found[0] += sizes.embedding_parameters(training.model, tensor)
    found[-1] += sizes.head_parameters(training.model, tensor, own_word=stages > 1)
    return found.tolist()


def parts_by_memory(plan: Plan) -> str:
    """Say in which proportion replicas of a stage keep what they share out, where that is not the same."""
    if plan.training.parallel.shards is not Shards.memory:
        return ""
    from fasop.simulation.memory_of_stages import shards_of  # few plans share out by memory

    shards = shards_of(plan)
    if shards is None:
        return ""
    unlike = {stage: parts for stage, parts in enumerate(shards) if len({*parts}) > 1}
    texts = [
        f"of stage {stage} "
        + ", ".join(f"{part / sum(parts):.1%} on replica {replica}" for replica, part in enumerate(parts))
        for stage, parts in unlike.items()
    ]
    more = f"; and so on, {len(texts)} stages" if len(texts) > MOST_STAGES else ""
    return f"In the first plan replicas keep by memory {'; '.join(texts[:MOST_STAGES])}{more}."


def gained_by_stage(first: Plan, alike: Plan) -> str:
    """What replicas or tensor sizes by stage gain over the best plan without, if they do."""
    p = first.parallel
    if p.alike:
        return ""
    sizes = [f"tensor sizes {p.tensor}"] if not isinstance(p.tensor, int) else []
    sizes += [f"replicas {p.replicas}"] if p.replicas else []
    return (
        f"{' and '.join(sizes).capitalize()} gain {alike.total / first.total - 1:.1%}: the best plan with equal "
        f"stages takes {alike.total * 1e3:.1f} ms ({_in_short(alike.parallel)})."
    )


def kept_by_stage(first: Plan, alike: Plan) -> str:
    """What stages gain that each keep their own share, or their own things in the host's memory, or compute their own
    number of layers again."""
    p = first.training.parallel
    by_stage = [name for name in ("zero", "offload") if isinstance(getattr(p, name), tuple)]
    by_stage += ["recompute"] if len(p.recompute.stages) > 1 else []
    if not by_stage:
        return ""
    given = " and ".join(f"parallel.{name}={getattr(first.parallel, name)}" for name in by_stage)
    return (
        f"{given} gains {alike.total / first.total - 1:.1%}: the best plan that keeps the same in all stages takes "
        f"{alike.total * 1e3:.1f} ms."
    )


def gained(first: Plan, even: Sequence[Plan]) -> str:
    """What unequal shares gain over the best plan without, if there is one."""
    if first.parallel.shares is None:
        return ""
    if not even:
        return (
            f"All plans have unequal shares, such as {first.parallel.shares}: no number of replicas divides the batch "
            "evenly."
        )
    best = even[0]
    return (
        f"Shares {first.parallel.shares} gain {best.total / first.total - 1:.1%}: the best plan with equal shares "
        f"takes {best.total * 1e3:.1f} ms ({_in_short(best.parallel)})."
    )


def _in_short(parallel: Parallel) -> str:
    return (
        f"tensor {parallel.tensor_size} x data {parallel.data} x pipeline {parallel.pipeline}, {parallel.partition}, "
        f"{parallel.node_order}"
    )


def looked_at(
    inputs: Inputs, seen: Coverage, sets: str, by_stage: Looked | None = None, *, with_zero: bool = False
) -> str:
    """What a search has gone through, on `sets` of nodes; `with_zero`: also stages of ZeRO beyond the first."""
    orders = node_orders.described([kind.group.count for kind in inputs.kinds], inputs.training.blocks.layers)
    limited = (
        f", with at most {MOST_MICRO_BATCHES} micro-batches for each replica"
        if inputs.training.parallel.global_batch_size > MOST_MICRO_BATCHES
        else ""
    )
    left = f" It had no time for {seen.left} of these that may be better." if seen.left else ""
    unlike = f" It also covered {_layouts(by_stage)}." if by_stage is not None else ""
    combined = "sizes, schedule and stage of ZeRO" if with_zero else "sizes and schedule"
    covered = f"The search covered {seen.sizes} combinations of {combined} on {sets}, in {orders}{limited}."
    return f"{covered}{left}{unlike}"


def looked_at_alone(by_stage: Looked) -> str:
    """The same where no plan has equal stages."""
    return f"No plan with equal stages has these sizes and fits. The search covered {_layouts(by_stage)}."


def _layouts(by_stage: Looked) -> str:
    return (
        f"{by_stage.layouts} layouts with stages that differ in replicas or tensor sizes ({by_stage.said}) on "
        f"{by_stage.nodes}, in {plural(by_stage.orders, 'node order')} with {by_stage.schedules}"
    )


def proved(least: float, first: Plan, by_stage: Looked | None, *, closer: bool) -> str:
    """What is proved of the even plans that were covered (none takes less than `least`), of the layouts with stages
    that differ, and of the first plan's partitions; `closer`: whether prove=true was not asked for."""
    if first.parallel.shares is None and first.pipelines is not None:
        least = min(least, first.bound)
    sentences = (_of_even(least, first), _of_stages(first, by_stage), best_layers(first.gap))
    gaps = [1 - least / first.total, first.gap, *([1 - by_stage.least / first.total] if by_stage else [])]
    hint = " prove=true may tighten these bounds." if closer and max(gaps) > OPTIMAL else ""
    proofs = " ".join(filter(None, sentences))
    return f"Proved: {proofs[0].lower()}{proofs[1:]}{hint}"


def front(plans: Sequence[Plan], expense: str, tried: int) -> str:
    """What a front is, and on how many sets of nodes it covers stages that differ."""
    found = f"The search found no plan that beats any of these {len(plans)} in both time and {expense}."
    if plans[0].training.megatron_lm:
        return found
    where = f"on {plural(tried, 'set')} of nodes" if tried else "on no set of nodes"
    return (
        f"{found} It tried stages that differ in replicas or tensor sizes {where}; a search without pareto on the "
        f"nodes of one plan may find more of them."
    )


def _of_even(least: float, first: Plan) -> str:
    if math.isinf(least):  # there are none
        return ""
    if least > first.total:
        return "every plan with equal shares and equal stages among these combinations is slower than the first."
    gap = 1 - least / first.total
    faster = f"more than {_at_most(gap)} faster" if gap > OPTIMAL else "faster"
    return f"no plan with equal shares and equal stages among these combinations is {faster} than the first."


def _at_most(gap: float) -> str:
    """Rounded up, so that it is true as it is printed."""
    return f"{max(math.ceil(gap * 1e3 - 1e-9), 1) / 1e3:.1%}"


def _of_stages(first: Plan, by_stage: Looked | None) -> str:
    if by_stage is None:
        return ""
    gap = 1 - by_stage.least / first.total
    faster = f"more than {_at_most(gap)} faster" if gap > OPTIMAL else "faster"
    return f"None of these {by_stage.layouts} layouts is {faster} than the first plan."


def best_layers(gap: float) -> str:
    """What is proved of the first plan's layers per stage."""
    if gap < OPTIMAL:
        return "With its sizes, options and node order, the first plan has the best layers per stage."
    return (
        "With its sizes, options and node order, other layers per stage would make the first plan at most "
        f"{_at_most(gap)} faster."
    )
