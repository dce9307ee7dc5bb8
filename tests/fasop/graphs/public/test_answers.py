"""The public optimizer's answers, as its own program gave them (msr-fiddle/pipedream, commit 7db6a1c) for graphs of
ours. `benchmarks/public_pipedream.py` compares those of all public profiles."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fasop.errors import SearchError
from fasop.graphs.division import Level, Options, Sync
from fasop.graphs.graph import Graph, Operator, Operators
from fasop.graphs.graph_text import graph_text
from fasop.graphs.public.recurrence import divide
from fasop.graphs.public.states import States
from tests.support.profiled_graphs import branches, chain, node

ANSWERS: list[tuple[Any, list[tuple[int, float]], dict[str, Any], float, float, str]] = [
    (chain, [(4, 1e9)], {}, 0.01521, 0.0616075, "2-1-1"),
    (chain, [(4, 1e9)], {"compression": 1.0}, 0.01521, 0.0616075, "2-1-1"),
    (chain, [(4, 1e9)], {"straight": True, "compression": 1.0}, 0.018, 0.0616075, "1-1-1-1"),
    (chain, [(8, 2e9)], {"compression": 1.0}, 0.008259591836734694, 0.0209896875, "7-1"),
    (chain, [(8, 2e9)], {"memory_bytes": 4e7, "compression": 1.0}, 0.008259591836734694, 0.0209896875, "7-1"),
    (chain, [(2, 1e10), (2, 1e9)], {"compression": 1.0}, 0.015021, 0.0490455, "1x2-1x1-1x1"),
    (chain, [(2, 1e10), (2, 1e9)], {"straight": True, "compression": 1.0}, 0.018, 0.0490455, "1x1-1x1-1x1-1x1"),
    (chain, [(3, 4e9), (2, 5e8)], {}, 0.01215, 0.0585188888888889, "1x3-1x2-1x1"),
    (chain, [(3, 4e9), (2, 5e8)], {"compression": 1.0}, 0.014846666666666666, 0.0585188888888889, "1x3-1x2-1x1"),
    (chain, [(3, 4e9), (2, 5e8)], {"compression": 2.0}, 0.01215, 0.0585188888888889, "1x3-1x2-1x1"),
    (branches, [(4, 1e9)], {"compression": 1.0}, 0.022, 0.056625, "1-2-1"),
    (branches, [(4, 1e9)], {"fewer": True, "compression": 1.0}, 0.022, 0.056625, "1-2-1"),
    (branches, [(4, 1e9)], {"memory_bytes": 4e7, "compression": 1.0}, 0.022, 0.056625, "1-1-1-1"),
    (branches, [(8, 2e9)], {}, 0.012444444444444444, 0.019953125, "1-3-3-1"),
    (branches, [(8, 2e9)], {"straight": True, "compression": 1.0}, 0.014, 0.019953125, "1-1-1-1-1-1-1-1"),
    (branches, [(8, 2e9)], {"memory_bytes": 4e7, "compression": 1.0}, 0.01368, 0.019953125, "5-2-1"),
    (branches, [(2, 1e10), (2, 1e9)], {}, 0.019, 0.045925, "1x1-1x1-1x2"),
    (branches, [(2, 1e10), (2, 1e9)], {"compression": 1.0}, 0.02, 0.045925, "1x1-1x1-1x2"),
    (branches, [(3, 4e9), (2, 5e8)], {}, 0.014, 0.05261111111111111, "1x3-1x1-1x1-1x1"),
    (
        branches,
        [(3, 4e9), (2, 5e8)],
        {"fewer": True, "compression": 1.0},
        0.017,
        0.05261111111111111,
        "1x1-1x2-1x2-1x1",
    ),
]


@pytest.mark.parametrize(
    ("graph", "network", "options", "pipeline_s", "data_parallel_s", "replicas"),
    ANSWERS,
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_answers_are_the_public_ones(
    graph: Any, network: Any, options: dict[str, Any], pipeline_s: float, data_parallel_s: float, replicas: str
) -> None:
    """Replicas as recorded, too: of the first one of several equally fast divisions."""
    levels = [Level(machines=machines, bytes_per_s=rate) for machines, rate in network]
    answer = divide(graph(), levels, Options(**options))
    assert answer.pipeline_s == pytest.approx(pipeline_s, rel=1e-9)
    assert answer.data_parallel_s == pytest.approx(data_parallel_s, rel=1e-9)
    assert answer.replicas == replicas


def test_the_graph_is_written_with_stages_as_the_public_tool_does() -> None:
    """Its own program wrote these lines for the chain on 8 machines, the input after the others."""
    answer = divide(chain(), [Level(machines=8, bytes_per_s=2e9)], Options(compression=1.0))
    assert graph_text(answer.graph).splitlines()[:7] == [
        f"node{number} -- {name} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
        f"activation_size={sent}, parameter_size={parameters:.3f} -- stage_id={stage}"
        for number, (name, forward, backward, sent, parameters, stage) in enumerate(
            [
                ("Input0", 0, 0, 0.0, 0, 0),
                ("Linear(node1)", 4, 8, 8e6, 1e4, 0),
                ("Linear(node2)", 6, 12, 4e6, 2e5, 0),
                ("Linear(node3)", 5, 9, 2e6, 6e5, 0),
                ("Linear(node4)", 3, 6, 1e6, 2e6, 0),
                ("Linear(node5)", 1, 2, 2e5, 4e7, 1),
                ("Linear(node6)", 1, 1, 1e5, 2e7, 1),
            ]
        )
    ]


def test_a_state_holds_all_that_it_depends_on_and_begins_with_the_first_source() -> None:
    operators = Operators(branches())
    assert {node.name for node in operators.nodes}.isdisjoint({"words", "state"})
    states = States(operators)
    assert states.count == 11
    assert operators.nodes[states.first].name == "embed"
    for number, held in enumerate(states.masks):
        assert [k for k in range(states.count) if k != number and held | states.masks[k] == held] == [
            *states.within(number)
        ]
        assert all(operators.below[one] & ~held == 0 for one in range(operators.count) if held >> one & 1)
    embed = next(number for number, held in enumerate(states.masks) if held.bit_count() == 1)
    assert states.sent[embed] == 3e6


def test_what_the_public_optimizer_leaves_out_is_named() -> None:
    graph = Graph((node("a", 1, 1, 1e3), node("b", 1, 1, 1e3, 0, ("a",)), node("c", 5, 5, 1e3)))
    answer = divide(graph, [Level(machines=2, bytes_per_s=1e9)], Options())
    assert answer.pipeline_s == pytest.approx(0.002)
    assert [one.stage for one in answer.graph.nodes] == [0, 0, None]
    assert "gives c no stage" in answer.notes[0]


def test_what_cannot_be_divided() -> None:
    with pytest.raises(SearchError, match="straight=true: the graph has 6 states, too few for a stage on each of 8"):
        divide(chain(), [Level(machines=8, bytes_per_s=1e9)], Options(straight=True))
    with pytest.raises(SearchError, match="memory_gb=1e-05: by the public rule no division"):
        divide(chain(), [Level(machines=4, bytes_per_s=1e9)], Options(memory_bytes=1e4, straight=True))
    alone = Operator(name="x", description="Input0", forward_ms=1, backward_ms=0, outputs=(1,), parameter_bytes=0)
    with pytest.raises(SearchError, match="only inputs"):
        divide(Graph((alone,)), [Level(machines=1, bytes_per_s=1e9)], Options())


def test_more_antichains_than_the_public_tables_hold_are_refused() -> None:
    """Two of thirteen operators beside each other are 8,192 sets."""
    wide = Graph((node("a", 1, 1, 1), *(node(f"b{number}", 1, 1, 1, 0, ("a",)) for number in range(13))))
    with pytest.raises(SearchError, match="more than 6000 antichains"):
        divide(wide, [Level(machines=2, bytes_per_s=1e9)], Options())


@pytest.mark.parametrize("seed", range(12))
def test_with_sync_max_the_longer_of_computing_and_summing_counts(seed: int) -> None:
    """The paper's recurrence on a chain, written down again."""
    chance = random.Random(seed)
    machines, rate, count = 2 + seed % 4, 1e9, 5
    nodes = [
        node(f"n{i}", *(chance.uniform(1, 9) for _ in "fb"), chance.uniform(0, 9e6), chance.uniform(0, 2e7), before)  # type: ignore[call-arg]
        for i, before in enumerate([(), *((f"n{i}",) for i in range(count - 1))])
    ]

    def stage(first: int, end: int, replicas: int) -> float:
        parameters = sum(one.parameter_bytes for one in nodes[first:end])
        compute = sum(one.compute_ms for one in nodes[first:end]) / 1e3
        return max(compute, 4 * (replicas - 1) * parameters / (rate * replicas)) / replicas

    def link(end: int, replicas: int) -> float:
        return 2 * nodes[end - 1].activation_bytes / (rate * replicas) if end < count else 0.0

    def best(end: int, left: int) -> float:
        return min(
            [stage(0, end, left)]
            + [
                max(best(cut, left - last), stage(cut, end, last), link(cut, last), link(end, last))
                for cut in range(1, end)
                for last in range(1, left)
            ]
        )

    levels = [Level(machines=machines, bytes_per_s=rate)]
    longer = divide(Graph(tuple(nodes)), levels, Options(compression=1.0, sync=Sync.max))
    assert longer.pipeline_s == pytest.approx(best(count, machines), rel=1e-9)
    assert longer.data_parallel_s == pytest.approx(stage(0, count, machines), rel=1e-9)
    assert longer.pipeline_s <= divide(Graph(tuple(nodes)), levels, Options(compression=1.0)).pipeline_s
