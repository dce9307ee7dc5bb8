"""A graph divided into stages: what a search is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fasop.costs.arrays import Floats
from fasop.graphs.graph import Graph, Operator
from fasop.graphs.operators import Operators


@dataclass(frozen=True, kw_only=True)
class Level:
    machines: int
    bytes_per_s: float


class Sync(StrEnum):
    """What a stage with replicas takes for a mini-batch."""

    sum = "sum"
    """First its operators, then the sum of its gradients."""
    max = "max"
    """The longer of the two: gradients are summed while the next mini-batches are computed."""

    def together(self, compute_s: Floats | float, summing_s: Floats | float) -> Floats:
        return np.add(compute_s, summing_s) if self is Sync.sum else np.maximum(compute_s, summing_s)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The public optimizer's flags, and how gradients are summed."""

    memory_bytes: float | None = None
    """Memory of each machine; None: it does not limit."""
    straight: bool = False
    """No replicas."""
    fewer: bool = False
    """Fewer machines where more are no faster."""
    compression: float | None = None
    """What activations are divided by before they are sent; None: sending them takes no time."""
    sync: Sync = Sync.sum


@dataclass(frozen=True, kw_only=True)
class Takes:
    """Seconds of each mini-batch of the pipeline, in the steady state, all replicas of the stage together."""

    compute_s: float
    """On the slowest GPU."""
    summing_s: float
    """Seconds of summing the gradients."""
    received_s: float
    """Seconds of the busiest link that what enters the stage crosses, there and its gradients back."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    nodes: tuple[Operator, ...]
    """Each after its inputs."""
    replicas: tuple[int, ...]
    """Replicas on each level of the network, the outermost first; a stage on contiguous ranks has one number."""
    versions: int | None = None
    """Versions of the weights that are alive at once, at most; None: not known."""
    memory_bytes: float | None = None
    """Memory that a rank needs."""
    takes: Takes | None = None
    """None: not known, as of nested stages."""

    @property
    def compute_s(self) -> float:
        """Add up the seconds of a mini-batch on one machine."""
        return sum(node.compute_ms for node in self.nodes) / 1e3

    @property
    def parameter_bytes(self) -> float:
        return sum(node.parameter_bytes for node in self.nodes)

    @property
    def activation_bytes(self) -> float:
        """From the forward to the backward pass of a mini-batch."""
        return sum(node.held_bytes for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class StageDivision:
    stages: tuple[Stage, ...]
    graph: Graph
    """With stages, as the public optimizer writes it."""
    pipeline_s: float
    """Seconds of a mini-batch in the steady state: those of the slowest stage or link."""
    sync: Sync = Sync.sum
    """How stages are counted whose gradients are summed."""
    data_parallel_s: float
    single_s: float
    """On one machine."""
    node_order: str | None = None
    """A node order that `parallel.node_order` takes; None: the machines are no cluster."""
    notes: tuple[str, ...] = ()
    """In words, what is proved of it, and what else a reader must know."""

    @property
    def replicas(self) -> str:
        """Write the replicas of each stage, such as 15-1; by level and stage such as 2x3-2x1."""
        return "-".join("x".join(map(str, stage.replicas)) for stage in self.stages)


def stages_of(
    operators: Operators, placed: Sequence[int | None], replicas: Sequence[tuple[int, ...]]
) -> tuple[Stage, ...]:
    """Make the stages from the number of each operator's stage."""
    return tuple(
        Stage(
            nodes=tuple(node for node, where in zip(operators.nodes, placed, strict=True) if where == stage),
            replicas=several,
        )
        for stage, several in enumerate(replicas)
    )
