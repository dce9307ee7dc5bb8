"""A profiled model: its operators, what each takes and holds, and whose results it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
