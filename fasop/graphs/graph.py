"""A profiled model: its operators, what each takes and holds, and whose results it uses; and the operators that a
search divides into stages, numbered, with sets of them as bit masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fasop.bits import bits, mask
from fasop.costs.arrays import Floats
from fasop.errors import SearchError

PART = "__getitem__"
"""How the description of a node begins that takes one of several results of another one."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator. Times and bytes are of a whole mini-batch."""

    name: str
    description: str
    forward_ms: float
    backward_ms: float
    outputs: tuple[float, ...]
    """Bytes of each of its results, one or more."""
    parameter_bytes: float
    inputs: tuple[str, ...] = ()
    """Names of the nodes whose results it takes, in the order of its arguments; a name may come twice."""
    stage: int | None = None
    kept_bytes: float | None = None
    """From the forward to the backward pass; None: its results, if they are not those of another node."""
    fixed_bytes: float = 0.0
    """Bytes of what is not trained, of which there is one copy."""

    @property
    def activation_bytes(self) -> float:
        return sum(self.outputs)

    @property
    def is_part(self) -> bool:
        """Whether it is one of several results of another node, as profilers show them."""
        return self.description.startswith(PART)

    @property
    def held_bytes(self) -> float:
        """From the forward to the backward pass."""
        if self.kept_bytes is not None:
            return self.kept_bytes
        return 0.0 if self.is_part else self.activation_bytes

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Graph:
    """A graph without cycles; every input is one of its nodes, and no two have the same name."""

    nodes: tuple[Operator, ...]
    """In the order of their file."""

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """Map each node to those that take its results, in the order of the file."""
        found: dict[str, dict[str, None]] = {node.name: {} for node in self.nodes}
        for node in self.nodes:
            for name in node.inputs:
                found[name][node.name] = None
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def topological(self) -> Sequence[Operator]:
        """Every node after its inputs; else in the order of the file."""
        return [self.by_name[name] for name in sorted_names({node.name: node.inputs for node in self.nodes})]

    def with_stages(self, stages: Mapping[str, int]) -> Graph:
        """The same nodes, each on the stage that `stages` has for it, or on none."""
        return Graph(tuple(replace(node, stage=stages.get(node.name)) for node in self.nodes))

    def without(self, names: frozenset[str]) -> Graph:
        """The other nodes, and what leads from one of them to another."""
        return Graph(
            tuple(
                replace(node, inputs=tuple(name for name in node.inputs if name not in names))
                for node in self.nodes
                if node.name not in names
            )
        )


class Cycle(Exception):
    """Nodes that take each other's results."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(" -> ".join(names))
        self.names = names


def sorted_names(inputs: Mapping[str, Sequence[str]]) -> list[str]:
    """The keys of `inputs`, each after its own inputs; else in their order. Raises Cycle: there is no such order."""
    done: dict[str, None] = {}
    for start in inputs:
        path, todo = dict[str, None](), [(start, False)]
        while todo:
            name, left = todo.pop()
            if left:
                del path[name]
                done[name] = None
            elif name in path:
                names = [*path]
                raise Cycle([*names[names.index(name) :], name][::-1])
            elif name not in done:
                path[name] = None
                todo.append((name, True))
                todo += [(other, False) for other in reversed(inputs[name])]
    return [*done]


MOST = 10_000
"""The most operators that are divided: sets of them, and so memory and time, grow with their square."""


class Operators:
    """A graph without the nodes that stand for its inputs, and without unused parts of results.

    An input costs nothing on a stage: the samples are read there. A `__getitem__` that nobody uses is what a profiler
    saw of a tuple, such as an LSTM's state. Operator i is bit i of a mask; each has a larger number than its inputs.
    """

    def __init__(self, graph: Graph) -> None:
        """Raises SearchError: the graph has nothing to divide, or too much."""
        if len(graph.nodes) > MOST:
            raise SearchError(
                f"graph=: {len(graph.nodes):,} operators are too many to divide into stages, at most {MOST:,} are "
                "searched; profile larger modules as one operator each"
            )
        inputs = {n.name for n in graph.nodes if not n.inputs and n.description.startswith("Input")}
        left = graph.without(frozenset(inputs))
        unused = {n.name for n in left.nodes if not left.users[n.name] and n.is_part}
        self.graph = graph
        self.inputs = frozenset(inputs)
        self.unused = frozenset(unused)
        self.nodes = left.without(self.unused).topological
        self.count = len(self.nodes)
        if not self.nodes:
            raise SearchError("the graph has only inputs, so there is nothing to divide into stages")
        self.number = {node.name: number for number, node in enumerate(self.nodes)}
        self.compute_s: Floats = np.array([node.compute_ms / 1e3 for node in self.nodes])
        self.activations: Floats = np.array([node.activation_bytes for node in self.nodes])
        self.held: Floats = np.array([node.held_bytes for node in self.nodes])
        """Bytes from the forward to the backward pass."""
        self.fixed: Floats = np.array([node.fixed_bytes for node in self.nodes])
        """Bytes of what is not trained."""
        self.parameters: Floats = np.array([node.parameter_bytes for node in self.nodes])
        self.takes = [mask(self.number[name] for name in node.inputs) for node in self.nodes]
        """For each operator, whose results it uses."""
        self.users, self.above = users_and_above(self.takes)
        """For each operator, which use its results, and all that depend on it, both without itself."""
        self.below = [0] * self.count
        """For each operator, all that it depends on, without itself."""
        for number, taken in enumerate(self.takes):
            for other in bits(taken):
                self.below[number] |= self.below[other] | 1 << other

    @property
    def all(self) -> int:
        return (1 << self.count) - 1

    def annotated(self, stages: list[int | None]) -> Graph:
        """The graph as the public optimizer writes it: each operator with its stage, inputs on the first one and
        without costs, unused parts of results left out."""
        graph = self.graph.without(self.unused)
        found: dict[str, int] = dict.fromkeys(self.inputs, 0)
        found.update((n.name, stage) for n, stage in zip(self.nodes, stages, strict=True) if stage is not None)
        nodes = [
            replace(node, forward_ms=0.0, backward_ms=0.0, outputs=(0.0,), parameter_bytes=0.0)
            if node.name in self.inputs
            else node
            for node in graph.nodes
        ]
        return Graph(tuple(nodes)).with_stages(found)


def users_and_above(takes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return masks for each number: those that take it, and all that depend on it; what a number takes is smaller."""
    users, above = [0] * len(takes), [0] * len(takes)
    for number, taken in enumerate(takes):
        for other in bits(taken):
            users[other] |= 1 << number
    for number in reversed(range(len(takes))):
        for other in bits(users[number]):
            above[number] |= above[other] | 1 << other
    return users, above
