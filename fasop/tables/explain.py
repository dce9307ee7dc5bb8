"""Where each second and each byte of a plan goes, stage by stage, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import mean
from typing import TYPE_CHECKING

from fasop.costs.memory.amounts import GIB, StageMemory
from fasop.simulation.iteration import Terms
from fasop.simulation.predict import Prediction, Stage

if TYPE_CHECKING:
    from fasop.search.robustness import Slowdown

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heading and rows."""

TERMS = tuple(field.name for field in fields(Terms))
HELD = tuple(field.name for field in fields(StageMemory))


def times(prediction: Prediction) -> Table:
    """Milliseconds of an iteration by stage; the terms of a stage are all of the iteration, which is as long for all.

    The last row has the stages' mean shares of it.
    """
    rows = [
        [*_who(stage), *(f"{seconds * 1e3:.1f}" for seconds in stage.terms.by_name().values())]
        for stage in prediction.stages
    ]
    shares = [
        mean(stage.terms.by_name()[name] for stage in prediction.stages) / prediction.iteration_s for name in TERMS
    ]
    rows.append(["all", "", "", *(f"{share:.1%}" for share in shares)])
    return (*_WHO, *TERMS), rows


def memory(prediction: Prediction) -> Table:
    """GiB of a rank by stage, against its smallest GPU's."""
    rows = []
    for stage in prediction.stages:
        layers = sum(stage.layers)
        parts = [amount.of(layers) / GIB for amount in stage.memory.by_term().values()]
        held = (*parts, stage.memory_gib, stage.limit_gib, stage.limit_gib - stage.memory_gib)
        rows.append([*_who(stage), *(f"{gib:.2f}" for gib in held)])
    return (*_WHO, *HELD, "sum", "GPU has", "left"), rows


def slower(cases: Sequence[Slowdown]) -> Table:
    """An iteration in each case, and what the case adds; the first one is the plan as it is."""
    usual = cases[0].seconds
    return ("slower", "iteration", "adds"), [
        [case.what or "nothing", f"{case.seconds * 1e3:.1f} ms", f"{case.seconds / usual - 1:.1%}"] for case in cases
    ]


_WHO = ("stage", "GPU", "layers")


def _who(stage: Stage) -> list[str]:
    return [stage.name, ", ".join(stage.gpus), stage.contents]


LEGEND = (
    "messages: waits while one is under way; bubble: waits until other stages have computed; gradients: their "
    "all-reduce over the replicas, as far as the backward pass does not hide it; embedding: the all-reduce of its "
    "gradients between the first and the last stage; optimizer: the update; weights: their all-gather with a sharded "
    "optimizer"
)
