"""graph.txt: what is read is what was written, and one message names the first wrong line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasop.graphs.graph_text import GraphError, doubts, graph_text, parse, read_graph
from tests.support.profiled_graphs import branches, chain, random_graph


def line(name: str, description: str, forward: float, backward: float) -> str:
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{name} -- {description} -- {times}, activation_size=8.0, parameter_size=16.000"


NODE = line("a", "Linear(2, 2)", 1, 2.5)
OTHER = NODE.replace("a -- ", "b -- ", 1)


def test_what_the_public_tools_write_is_written_again() -> None:
    text = (
        "a -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, "
        "parameter_size=0.000\n"
        "b -- LSTM(4, 4) -- forward_compute_time=2.492, backward_compute_time=4.201, "
        "activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=33587200.000 -- stage_id=0\n"
        "c -- Add -- forward_compute_time=0.001, backward_compute_time=0.000, activation_size=6291456.0, "
        "parameter_size=0.000 -- stage_id=12\n"
        "\ta -- b\n\tb -- c\n\ta -- c\n\tb -- c\n"
    )
    graph = parse(text, "graph.txt")
    assert graph_text(graph) == text
    lstm, add = graph.nodes[1:]
    assert (lstm.activation_bytes, lstm.compute_ms, lstm.stage) == (6553600, 6.693, 0)
    assert add.inputs == ("b", "a", "b"), "the order of edges is that of the arguments"


@pytest.mark.parametrize("graph", [chain(), branches(), *(random_graph(seed, 8) for seed in range(5))])
def test_graphs_are_read_as_they_were_written(graph, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "graph.txt"
    file.write_text(graph_text(graph))
    read = read_graph(file)
    assert graph_text(read) == graph_text(graph)
    assert [(n.name, n.inputs, n.description, n.outputs) for n in read.nodes] == [
        (n.name, n.inputs, n.description, n.outputs) for n in graph.nodes
    ]


def test_older_files_have_other_zeros_and_nodes_in_any_order() -> None:
    graph = parse(f"{OTHER}\n{NODE.replace('=8.0', '=8.000')}\n\n\ta -- b\n", "old")
    assert [node.name for node in graph.topological] == ["a", "b"]
    assert graph.nodes[1].outputs == (8.0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph.txt has no nodes; the line of a node is NAME -- DESCRIPTION"),
        (f"{NODE}\nb: Linear\n", "graph.txt, line 2: neither a node nor an edge"),
        (f"{NODE}\n{NODE}\n", "line 2: node 'a' already has a line above"),
        (f"{NODE}\n\ta -- z\n", "line 2: no line above describes node 'z'"),
        (f"{NODE}\n\ta\n", "line 2: 'a' is not an edge; an edge is a tab, SOURCE -- TARGET"),
        (NODE.replace("forward", "fwd"), "line 1: 'fwd_compute_time=1.000"),
        (
            NODE.replace("1.000", "fast"),
            "line 1: forward_compute_time=fast must be a number of milliseconds, at least 0",
        ),
        (NODE.replace("2.500", "-1"), "line 1: backward_compute_time=-1 must be"),
        (NODE.replace("8.0", "nan"), "line 1: activation_size=nan must be a number of bytes"),
        (NODE.replace("8.0", "[1.0; x]"), "line 1: activation_size=x must be a number of bytes"),
        (NODE.replace("16.000", "[1.0; 2.0]"), "line 1: parameter_size has 2 values; only activation_size lists"),
        (f"{NODE} -- stage_id=-1", "line 1: stage_id=-1 must be a whole number"),
        (f"{NODE} -- stage_id={'9' * 5000}", "line 1: stage_id=99"),
        (f"{NODE}\n{OTHER}\n\ta -- b\n\tb -- a\n", "line 4: this edge closes a cycle, "),
        (f"{NODE}\n\ta -- a\n", "line 2: this edge closes a cycle, a -> a"),
    ],
    ids=lambda value: value[:40] if "line" in value or "has no" in value else "",
)
def test_the_first_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(GraphError) as error:
        parse(text, "graph.txt")
    assert message in str(error.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(f"{NODE}\n".encode() + b"\xff\xfe\n")
    with pytest.raises(GraphError, match="line 2: not UTF-8 text"):
        read_graph(tmp_path / "bytes")
    with pytest.raises(GraphError, match="cannot be read: No such file"):
        read_graph(tmp_path / "none")


def test_deep_graphs_are_read() -> None:
    """Deeper than Python's recursion."""
    graph = random_graph(1, 1)
    lines = [graph_text(graph).strip().replace("n0 --", f"n{number} --", 1) for number in range(5000)]
    lines += [f"\tn{number} -- n{number + 1}" for number in range(4999)]
    assert [node.name for node in parse("\n".join(lines), "deep").topological[:3]] == ["n0", "n1", "n2"]


def test_odd_figures_are_reported_and_kept() -> None:
    graph = chain()
    assert [*doubts(graph)] == [
        "node0 (Input0) takes 30 ms in this profile although an input computes nothing: the profile probably measured "
        "waiting for data; counted as 0"
    ]
    short, idle = line("a", "EmuBidirLSTM(8)", 5.247, 0.016), line("b", "Linear(2)", 0, 0)
    found = [*doubts(parse(f"{short}\n{idle}\n", "odd"))]
    assert found[0].startswith("a (EmuBidirLSTM) has a backward pass of 0.016 ms after a forward pass of 5.247 ms")
    assert found[1].startswith("b (Linear) has parameters but takes no time")
    assert not [*doubts(branches())]
