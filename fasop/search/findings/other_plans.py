"""Plans that a search finds for the GPUs of a run, beside the plan that the run has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError
from conf.schema.parallel import Parallel
from conf.schema.values.partition import Partition
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import Inputs, of_experiment
from fasop.search.run import best_plans
from fasop.simulation.predict import planned, predict, predict_plan


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """How it differs from the run's.

    Making it raises ValueError for what cannot be.
    """

    iteration_s: float
    """Predicted."""
    own_s: float
    """The same of the run's plan."""
    differs: dict[str, str]
    """For each key of `parallel`, what the plan has in the place of the run's; empty where it is the run's plan."""

    def __post_init__(self) -> None:
        if not (0 < self.iteration_s < math.inf and 0 < self.own_s < math.inf):
            raise ValueError(f"iteration_s={self.iteration_s} and own_s={self.own_s} must be above 0 and finite")
        try:
            self.layers()
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def layers(self) -> tuple[int, ...] | None:
        """Return the layers of each part, where the plan differs from the run's in them alone."""
        return Partition.parse(self.differs["partition"]).layers if {*self.differs} == {"partition"} else None


if TYPE_CHECKING:
    from conf.schema.experiment import Experiment

KEYS = (
    *("tensor", "data", "replicas", "pipeline", "partition", "node_order", "shares", "micro_batch_size", "schedule"),
    *("chunks", "recompute", "sharded_optimizer", "streams"),
)
"""The keys of `parallel` in which plans are compared."""


def other_plans(experiment: Experiment, schedule: Mapping[str, Any] | None = None) -> list[FoundPlan]:
    """The best plan, and the best that differs from the run's in its layers per stage alone.

    Args:
        schedule: the content of `parallel.schedule_file`, if it has one.

    Raises:
        ConfigError: a profile cannot be read.
        SearchError: no plan fits, or nothing can be predicted of the run's.
    """
    placed = planned(experiment)
    own = replace(experiment.parallel, partition=str(placed.partition), node_order=str(experiment.node_order))
    if own.alike:  # which may be written stage by stage all the same
        own = replace(own, tensor=own.tensor_size, data=own.layout.replicas[0], replicas=None)
    own_s = predict(experiment, schedule).iteration_s
    inputs = of_experiment(experiment)
    found = [_best(inputs, own, own_s)]
    if own.alike and own.pipeline > 1 and schedule is None and "partition" in found[0].differs:
        found += _same_but_layers(inputs, own, own_s)
    return found


def _best(inputs: Inputs, own: Parallel, own_s: float) -> FoundPlan:
    plan = best_plans(inputs, Arguments(top=1, leave_out=False)).plans[0]
    differs = {
        key: "null" if value is None else str(value)
        for key in KEYS
        if (value := getattr(plan.parallel, key)) != getattr(own, key)
    }
    return FoundPlan(iteration_s=predict_plan(plan).iteration_s, own_s=own_s, differs=differs)


def _same_but_layers(inputs: Inputs, own: Parallel, own_s: float) -> Sequence[FoundPlan]:
    """Nothing where the search puts other nodes or shares beside other layers."""
    given = ("tensor", "data", "pipeline", "micro_batch_size", "schedule", "chunks", "recompute", "sharded_optimizer")
    fixed = replace(inputs, choices=replace(inputs.choices, **{key: (getattr(own, key),) for key in given}))
    try:
        found = _best(fixed, own, own_s)
    except SearchError:
        return ()
    return [found] if set(found.differs) == {"partition"} else ()
