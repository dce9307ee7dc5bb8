"""The page of a divided graph."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fasop.graphs.division import Level, Options, bound, takes
from fasop.graphs.graph import Graph, Operator
from fasop.graphs.graph_text import graph_text
from fasop.graphs.own.on_levels import on_levels
from fasop.graphs.own.versioned_memory import VersionedMemory
from fasop.graphs.public.recurrence import divide
from launch.cli import main
from reports.pages.graph_page import drawn_graph, drawn_times, render
from tests.reports.conftest import Opener
from tests.support.profiled_graphs import branches, node

LEVELS = [Level(machines=4, bytes_per_s=1e9)]


def test_operators_edges_and_cuts_are_drawn() -> None:
    division = on_levels(branches(), LEVELS, Options(), VersionedMemory())
    drawn = drawn_graph(division)
    within, crossing, *stages = drawn.data
    edges = sum(len(node.inputs) for node in division.graph.nodes)
    assert (len(within.x) + len(crossing.x)) / 3 == edges
    assert sum(len(stage.x) for stage in stages) == len(division.graph.nodes)
    where = {node.name: node.stage for node in division.graph.nodes}
    cut = sum(where[name] != node.stage for node in division.graph.nodes for name in node.inputs)
    assert len(crossing.x) / 3 == cut > 0
    forward, backward = drawn_times(division).data
    assert sum(forward.y) + sum(backward.y) == sum(node.compute_ms for node in division.graph.nodes)


def test_it_says_what_bounds_the_pipeline_and_what_each_stage_takes() -> None:
    """Of computing, of summing gradients, and of the links before and behind it."""
    heavy = Graph((node("a", 10, 20, 1e6, 1e3), node("b", 1, 1, 1e3, 1e3, ("a",))))
    computing = on_levels(heavy, [Level(machines=2, bytes_per_s=1e9)], Options(straight=True), VersionedMemory())
    assert bound(computing) == (
        "Stage 0 bounds the pipeline: each mini-batch takes 30.000 ms of compute and 0.000 ms of gradient all-reduce."
    )
    assert takes(computing)[1] == [
        ["0", "1", "30.000", "0.000", "30.000", "0.000", "2.000"],
        ["1", "1", "2.000", "0.000", "2.000", "2.000", "0.000"],
    ]
    slow = on_levels(heavy, [Level(machines=2, bytes_per_s=1e7)], Options(straight=True), VersionedMemory())
    assert bound(slow) == (
        "The messages between stage 0 and stage 1 bound the pipeline: each mini-batch takes 200.000 ms of the busiest "
        "link."
    )
    together = on_levels(
        Graph((node("a", 10, 20, 1e6, 1e6),)), [Level(machines=2, bytes_per_s=1e9)], Options(), VersionedMemory()
    )
    assert takes(together)[1] == [["0", "2", "15.000", "1.000", "16.000", "0.000", "0.000"]]
    assert escape(bound(slow)) in render("tdpp search", slow)
    public = divide(heavy, [Level(machines=2, bytes_per_s=1e9)], Options())
    assert (bound(public), takes(public)[1]) == ("", [])
    assert "all-reduce" not in render("tdpp search", public)


def test_its_operators_are_behind_a_line_that_the_keyboard_opens(tmp_path: Path, open_page: Opener) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        render("tdpp search graph=" + "x" * 200, on_levels(branches(), LEVELS, Options(), VersionedMemory()))
    )
    page = open_page(file, viewport={"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.inner_text(".verdict").count("bounds the pipeline") == 1
    assert page.locator("details table").is_hidden()
    page.focus("summary")
    page.keyboard.press("Enter")
    rows = page.locator("details tbody tr")
    assert rows.count() == len(branches().nodes) - 2, "but for the bare input and the result that nobody uses"
    assert rows.first.is_visible()


def test_the_page_opens_alone_whatever_a_profile_says(tmp_path: Path) -> None:
    """Names and descriptions are text."""
    hostile = "</script><img src=x onerror=alert(1)>"
    nodes = (
        Operator(name="a", description=hostile, forward_ms=1, backward_ms=1, outputs=(8.0,), parameter_bytes=8),
        Operator(
            name=hostile, description="b", forward_ms=1, backward_ms=1, outputs=(8.0,), parameter_bytes=8, inputs=("a",)
        ),
    )
    page = render("tdpp search", on_levels(Graph(nodes), LEVELS[:1], Options(fewer=True), VersionedMemory()))
    assert "<img" not in page
    file = tmp_path / "graph.txt"
    file.write_text(graph_text(branches()))
    words = [f"graph={file}", "levels=4", "bandwidths=1e9", f"page={tmp_path / 'page.html'}"]
    assert main(["search", *words]) == 0
    written = (tmp_path / "page.html").read_text()
    assert "(proved)" in written
    assert 'src="http' not in written
