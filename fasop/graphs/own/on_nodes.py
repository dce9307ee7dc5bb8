"""The best division of a graph over the nodes of a cluster, also of unlike ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fasop.costs.hardware import NodeKind
from fasop.costs.memory.allowance import communicator_bytes, context_bytes
from fasop.costs.memory.amounts import GIB
from fasop.errors import SearchError
from fasop.graphs.division import Options, StageDivision
from fasop.graphs.graph import Graph, Operators
from fasop.graphs.own.cuts import Work
from fasop.graphs.own.machines import of_nodes, require_few
from fasop.graphs.own.on_levels import division, nothing, proved
from fasop.graphs.own.recurrence import EQUAL, Best, Recurrence, fastest
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.search.space import node_orders

ORDERS_S = 20.0
"""CPU seconds for the orders of nodes."""
COMMUNICATORS = 4
"""Communicators of a rank, at most: of replicas, of the gradient's norm, and one each way between stages."""
NOTICEABLE = 1e-3
"""A part of the time that is worth another order of blocks."""


def on_nodes(
    graphs: Sequence[Graph],
    profiles: Sequence[int],
    kinds: Sequence[NodeKind],
    options: Options,
    held: VersionedMemory,
    *,
    in_order: bool = False,
) -> StageDivision:
    """On the nodes of a cluster, in the best order that was looked at; `graphs[profiles[k]]` has the times of kind k.
    With `in_order` stages lie in the one order of the operators.

    Raises:
        SearchError: nothing fits, or the graphs are not of one model.
    """
    gpus = sum(kind.gpus * kind.group.count for kind in kinds)
    require_few(gpus, "cluster", "leave groups of nodes out with cluster.exclude, or give fewer nodes")
    every = [Operators(graph) for graph in graphs]
    operators = every[0]
    for graph in graphs[1:]:
        _require_same(graphs[0], graph)
    times = np.stack([one.compute_s for one in every], axis=1)
    work = Work(operators, times, limited=True, in_order=in_order)
    counts = [kind.group.count for kind in kinds]
    orders = node_orders.orders(counts) if node_orders.few(counts) else node_orders.starts(counts)
    taken = [context_bytes(kind.gpu) + communicator_bytes(kind, COMMUNICATORS) for kind in kinds]
    memory = [kind.gpu.memory_gib * GIB - anyway for kind, anyway in zip(kinds, taken, strict=True)]
    until, best, looked = time.process_time() + ORDERS_S, None, 0
    for order in orders:
        turned = tuple(int(one) for one in order)
        if best is not None and time.process_time() > until:
            break
        looked += 1
        machines = of_nodes(kinds, turned, profiles, memory)
        counts = np.cumsum([kinds[one].gpus for one in turned]).tolist()[::-1]  # whole nodes
        found = fastest(work, machines, counts if options.fewer else counts[:1], options, held)
        if found is not None and (best is None or found.seconds < best[0].seconds * (1 - EQUAL)):
            best = found, turned, machines
    if best is None:
        raise nothing(options.straight, limited=True)
    found, turned, machines = best
    used = sum(piece.replicas for piece in found.pieces)
    nodes = np.cumsum([kinds[one].gpus for one in turned]).tolist().index(used) + 1
    names = _runs([kinds[one].name for one in turned[:nodes]])
    where = " in the order of the blocks" * in_order + " in this order of nodes" * (len(orders) > 1)
    notes = [proved(found, where)]
    if in_order:
        free = Work(operators, times, limited=True)
        notes += _in_other_orders(free, fastest(free, machines, [used], options, held), found)
    if len(orders) > 1:
        notes.append(f"nodes in the order {names}, the best of {looked} that were searched")
    whole = Recurrence(work, machines, Options(sync=options.sync), held)
    data_parallel = float(whole.stage_s(work.compute_s.sum(axis=0), np.array(work.parameters.sum()), 0, machines.count))
    return replace(division(operators, work, found, data_parallel, notes, options.sync), node_order=names)


def _in_other_orders(work: Work, best: Best | None, found: Best) -> Iterator[str]:
    """What the order of the operators costs, if it does."""
    if best is None or best.seconds >= found.seconds * (1 - NOTICEABLE):
        return
    placed, nodes = work.placed([piece.groups for piece in best.pieces]), work.nodes
    stages = [
        ", ".join(node.name for node, on in zip(nodes, placed, strict=True) if on == stage and not node.is_part)
        for stage in range(len(best.pieces))
    ]
    yield (
        f"blocks in another order could be divided {1 - best.seconds / found.seconds:.1%} faster, into "
        f"{'; '.join(stages)}; but a run uses the order in which the model calls them"
    )


def _runs(names: Sequence[str]) -> str:
    """Write names as parallel.node_order takes them."""
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return "+".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _require_same(graph: Graph, other: Graph) -> None:
    for one, two in zip(graph.nodes, other.nodes, strict=False):
        if (one.name, one.inputs) != (two.name, two.inputs):
            raise SearchError(
                f"the graphs belong to different models: one has node {one.name!r} after {list(one.inputs)}, the "
                f"other {two.name!r} after {list(two.inputs)}; profile the same model on each kind of GPU"
            )
    if len(graph.nodes) != len(other.nodes):
        raise SearchError(
            f"the graphs belong to different models: one has {len(graph.nodes)} nodes, the other {len(other.nodes)}"
        )
