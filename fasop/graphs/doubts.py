"""What of a profile looks wrong. It is reported, and used as it stands."""

from __future__ import annotations

from collections.abc import Iterator

from fasop.graphs.graph import Graph, Operator

NOTICEABLE = 0.01
"""The part of all nodes' time from which on a doubt matters."""
TOO_SHORT = 0.05
"""The part of its forward pass that a backward pass takes at least, where an operator has parameters."""


def doubts(graph: Graph) -> Iterator[str]:
    """In words, in the order of the graph."""
    total = sum(node.compute_ms for node in graph.nodes)
    for node in graph.nodes:
        if not node.inputs and node.description.startswith("Input"):
            if node.compute_ms:
                yield (
                    f"{_named(node)} takes {node.compute_ms:g} ms in this profile although an input computes nothing: "
                    f"the profile probably measured waiting for data; counted as 0"
                )
        elif not node.parameter_bytes:
            continue
        elif not node.compute_ms:
            yield f"{_named(node)} has parameters but takes no time in this profile; used unchanged"
        elif node.backward_ms < TOO_SHORT * node.forward_ms and node.forward_ms > NOTICEABLE * total:
            yield (
                f"{_named(node)} has a backward pass of {node.backward_ms:g} ms after a forward pass of "
                f"{node.forward_ms:g} ms: part of it was probably not measured; used unchanged"
            )


def _named(node: Operator) -> str:
    return f"{node.name} ({node.description.partition('(')[0].strip()})"
