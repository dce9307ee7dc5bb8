"""`tdpp search graph=FILE`: a table, files, and one message for what cannot be."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fasop.graphs.graph import Graph
from fasop.graphs.graph_text import graph_text, read_graph
from launch.cli import main
from tests.support.profiled_graphs import chain


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    file = tmp_path / "graph.txt"
    file.write_text(graph_text(chain()))
    return file


def test_the_public_answer_is_printed_and_written(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = graph.parent
    words = [f"graph={graph}", "levels=8", "bandwidths=2e9", "reference=true", "compression=1"]
    assert main(["search", *words, f"csv={folder / 'stages.csv'}", f"graph_output={folder / 'gpus=8.txt'}"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "stage  replicas  operators           alone    parameters  activations",
        "0      7         node1 to node4 (4)  53.0 ms  2.8 MB      15.0 MB",
        "1      1         node5 to node6 (2)  5.0 ms   60.0 MB     0.3 MB",
        "replicas 7-1: 8.260 ms per mini-batch, 121.07 per second; 2.54 times as fast as data parallelism (20.990 ms), "
        "7.02 times as fast as one machine (58.000 ms)",
    ]
    assert "node0 (Input0) takes 30 ms" in told.err
    assert [node.stage for node in read_graph(folder / "gpus=8.txt").nodes] == [0, 0, 0, 0, 0, 1, 1]
    with (folder / "stages.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["stage"], row["replicas"], row["operators"]) for row in rows] == [
        ("0", "7", "node1;node2;node3;node4"),
        ("1", "1", "node5;node6"),
    ]
    assert float(rows[0]["pipeline_s"]) == pytest.approx(0.0082595917)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs machines: levels=N"),
        (["reference=true"], "reference=true applies to machines in levels: add levels= and bandwidths="),
        (["cluster=a10x8", "memory_gb=16"], "memory_gb=16 applies to machines in levels"),
        (
            ["cluster=a100x1_a10x7"],
            "the cluster has a100_40gb, a10, which need separate times; give graph=a100_40gb:FILE",
        ),
        (["cluster=none_such"], "none_such"),
        (["levels=4,2", "bandwidths=1e9"], "levels=4,2 has 2 levels, but bandwidths=1e+09 has 1; give one bandwidth"),
        (["levels=4"], "levels=4 has 1 level, but bandwidths= is not given"),
        (["levels=4,0", "bandwidths=1e9,1e9"], "levels=4,0 must be a whole number, at least 1; separate several"),
        (
            ["levels=4,100000", "bandwidths=1e9,1e9"],
            "levels=4,100000: 400,000 machines are too many, a graph is divided",
        ),
        (["levels=1,1,1,1,1,1,1,1,2", f"bandwidths={','.join(['1e9'] * 9)}"], "9 levels of a network are too many"),
        (["levels=4", "bandwidths=1.25"], "bandwidths=1.25 must be bytes per second, at least 100000;"),
        (["levels=4", "bandwidths=1e9", "compression=0"], "compression=0 must be a number above 0"),
        (["levels=4", "bandwidths=1e9", "reference=yes"], "reference=yes must be true or false"),
        (["levels=4", "bandwidths=1e9", "model=xl"], "model=xl has no effect with levels=4"),
        (["levels=4", "bandwidths=1e9", "csv=/none/there.csv"], "cannot write /none/there.csv: no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_without_meaning(graph: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", f"graph={graph}", *words]) != 0
    assert message in capsys.readouterr().err


def test_stages_are_placed_on_the_nodes_of_a_cluster(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of GPU has a profile of its own; on A10 all takes twice as long."""
    slow = graph.parent / "slow.txt"
    times = [replace(node, forward_ms=2 * node.forward_ms, backward_ms=2 * node.backward_ms) for node in chain().nodes]
    slow.write_text(graph_text(Graph(tuple(times))))
    words = ["cluster=a100x1_a10x7", "cluster.groups.gpu2.count=1", "cluster.groups.hgx.gpus_per_node=2"]
    words += ["cluster.groups.gpu2.gpus_per_node=1", "straight=true"]
    assert main(["search", f"graph=a100_40gb:{graph},a10:{slow}", *words]) == 0
    told = capsys.readouterr()
    assert "replicas 1-1-1:" in told.out
    assert "nodes in the order" in told.err
    assert "no division on contiguous ranks in this order of nodes is faster (proved)" in told.err
    assert "a10: node0 (Input0) takes 60 ms" in told.err


def test_help_of_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "graph=", "--help"]) == 0
    assert "levels=4,2" in capsys.readouterr().out
