"""Small profiled graphs of our own."""

from __future__ import annotations

import random

from fasop.graphs.graph import Graph, Operator


def node(
    name: str, forward: float, backward: float, sent: float, parameters: float = 0.0, inputs: tuple[str, ...] = ()
) -> Operator:
    return Operator(
        name=name,
        description=f"Linear({name})",
        forward_ms=forward,
        backward_ms=backward,
        outputs=(sent,),
        parameter_bytes=parameters,
        inputs=inputs,
    )


def chain() -> Graph:
    """As VGG in small: much to compute first, many parameters last."""
    figures = [
        (4, 8, 8e6, 1e4),
        (6, 12, 4e6, 2e5),
        (5, 9, 2e6, 6e5),
        (3, 6, 1e6, 2e6),
        (1, 2, 2e5, 4e7),
        (1, 1, 1e5, 2e7),
    ]
    nodes = [
        Operator(
            name="node0",
            description="Input0",
            forward_ms=30,
            backward_ms=0,
            outputs=(1e6,),
            parameter_bytes=0,
        )
    ]
    for number, (forward, backward, sent, parameters) in enumerate(figures, 1):
        nodes.append(node(f"node{number}", forward, backward, sent, parameters, (f"node{number - 1}",)))
    return Graph(tuple(nodes))


def branches() -> Graph:
    """Two sources, a skip, an LSTM whose state nobody uses, and two branches that are joined."""
    return Graph(
        (
            Operator(name="words", description="Input0", forward_ms=0, backward_ms=0, outputs=(0,), parameter_bytes=0),
            node("embed", 1, 2, 3e6, 9e6, ("words",)),
            Operator(
                name="lstm",
                description="LSTM(8, 8)",
                forward_ms=5,
                backward_ms=9,
                outputs=(2e6, 1e5, 1e5),
                parameter_bytes=4e6,
                inputs=("embed",),
            ),
            node("first", 0, 0, 2e6, 0, ("lstm",)),
            Operator(
                name="state",
                description="__getitem__(1)",
                forward_ms=0,
                backward_ms=0,
                outputs=(1e5,),
                parameter_bytes=0,
                inputs=("lstm",),
            ),
            node("left", 3, 5, 2e6, 1e6, ("first",)),
            node("left2", 2, 4, 1e6, 2e6, ("left",)),
            node("right", 4, 7, 3e6, 5e5, ("first",)),
            node("joined", 1, 1, 4e6, 0, ("left2", "right", "embed")),
            node("other", 2, 2, 1e6, 6e6),
            node("mixed", 4, 6, 2e6, 1e6, ("joined", "other")),
            node("head", 3, 5, 1e6, 3e7, ("mixed",)),
        )
    )


def random_graph(seed: int, operators: int) -> Graph:
    """No two results are used in the same way: every shape of a graph may come."""
    chance = random.Random(seed)
    nodes: list[Operator] = []
    for number in range(operators):
        inputs = [one.name for one in nodes if chance.random() < 2 / (1 + len(nodes))]
        nodes.append(
            node(
                f"n{number}",
                chance.choice((0, chance.uniform(0, 4))),
                chance.choice((0, chance.uniform(0, 8))),
                chance.choice((0, chance.uniform(0, 4e6))),
                chance.choice((0, chance.uniform(0, 2e7))),
                tuple(inputs),
            )
        )
    return Graph(tuple(nodes))
