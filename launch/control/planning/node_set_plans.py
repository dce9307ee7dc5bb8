"""The plans with which an elastic run goes on after a loss, where a replica's stages lie on several nodes.

They are searched when the run is launched, so that the nodes that are left have one at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from conf.errors import reworded
from conf.schema.experiment import Experiment, Parallel
from fasop.costs.hardware import NodeKind
from fasop.errors import SearchError
from fasop.search.best_of_sets import best_of_sets
from fasop.search.inputs import of_experiment
from fasop.search.plan import Plan as FoundPlan
from fasop.search.space.node_sets import clusters
from fasop.simulation.predict import predict
from launch.node.elastic.replan import CUT
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import NodeSetPlan

MakePlan = Callable[[Experiment, str], Plan]
"""`launch.control.planning.plan.make_plan`."""
SEARCH_S = 10.0
"""CPU seconds for all sets of nodes, which are searched in the order of their sizes, the largest first."""
MOST_SETS = 60
"""Sets that are searched at most."""
SEARCHED = (
    *("tensor", "data", "pipeline", "partition", "sequence_parallel", "recompute", "sharded_optimizer", "schedule"),
    *("chunks", "replicas", "shares", "node_order"),
)
"""The keys of `parallel` that a search chooses here."""


def node_set_plans(experiment: Experiment, make_plan: MakePlan) -> list[NodeSetPlan]:
    """The run's own plan, and the best one for each set of its nodes but all of them, the fastest first.

    Micro-batches and their size stay as they are, and so does the loss.

    Raises:
        SearchError: what an iteration takes is not known, or no set of the nodes has a plan.
    """
    with reworded(
        SearchError,
        "elastic.enabled=true with a replica's stages on several nodes needs a plan for the nodes that a loss leaves: ",
        of=SearchError,
    ):
        inputs = of_experiment(experiment)
        sets = [some for some in clusters(inputs.kinds) if _nodes(some) >= experiment.elastic.min_nodes]
        choices = replace(inputs.choices, micro_batch_size=(experiment.parallel.micro_batch_size,))
        found = best_of_sets(replace(inputs, choices=choices), sets[1 : MOST_SETS + 1], SEARCH_S)
    own = _cut(make_plan, experiment, experiment.parallel, predict(experiment).iteration_s)
    others = [_cut(make_plan, experiment, replace(experiment.parallel, **_chosen(one)), one.total) for one in found]
    return [own, *others]


def _nodes(kinds: Sequence[NodeKind]) -> int:
    return sum(kind.group.count for kind in kinds)


def _chosen(found: FoundPlan) -> dict[str, Any]:
    return {key: getattr(found.parallel, key) for key in SEARCHED}


def _cut(make_plan: MakePlan, experiment: Experiment, parallel: Parallel, seconds: float) -> NodeSetPlan:
    other = replace(experiment.on_fixed_nodes(), parallel=parallel)
    train = replace(other.train, save_interval=1)  # with auto each plan would look for failures in past runs
    other = replace(other, train=train)
    plan = make_plan(other, "run")
    return NodeSetPlan(
        seconds=seconds,
        groups=[node.group for node in plan.nodes],
        counts=list(other.ranks_per_node()),
        padded_vocab_size=plan.model.padded_vocab_size,
        **{key: getattr(plan, key) for key in CUT},
    )
