"""What is hard to believe of a table of pairs."""

from __future__ import annotations

from dataclasses import replace

from conf.schema.values.links import PairLink
from fasop.costs.hardware import NodeKind
from fasop.costs.network.link_doubts import link_doubts
from fasop.costs.profiles.doubts import doubts
from fasop.costs.training import Training
from tests.support.fasop.plans import experiment, kinds

GROUP = kinds(experiment())[0].group
"""40 Gbit/s and 20 us."""


def found(links: dict[tuple[str, str], PairLink], names: str = "abc") -> list[str]:
    return [*link_doubts(dict.fromkeys(names, GROUP), links)]


def both(first: str, second: str, there: float, back: float) -> dict[tuple[str, str], PairLink]:
    return {(first, second): PairLink(gbit_per_s=there), (second, first): PairLink(gbit_per_s=back)}


def test_a_table_that_has_every_pair_in_like_figures_is_believed() -> None:
    assert found({}) == []
    assert found({("a", "a"): PairLink(gbit_per_s=9)}) == []
    assert found(both("a", "b", 10, 12) | both("a", "c", 40, 40) | both("b", "c", 1, 2)) == []


def test_a_pair_that_is_left_out_is_named_with_the_figures_that_it_has() -> None:
    (doubt,) = found(both("a", "b", 10, 10) | both("b", "c", 10, 10))
    assert doubt.startswith("cluster.links.a.c and its counterpart are missing: ")
    assert "40 Gbit/s and 20 us" in doubt


def test_directions_that_differ_and_pairs_faster_than_their_nodes_are_odd() -> None:
    (doubt,) = found(both("a", "b", 10, 21), "ab")
    assert doubt.startswith("cluster.links.a.b has up to 10 Gbit/s and cluster.links.b.a 21: ")
    faster = found(both("a", "b", 100, 100), "ab")
    assert [one.partition(", but")[0] for one in faster] == [
        "cluster.links.a.b has up to 100 Gbit/s",
        "cluster.links.b.a has up to 100 Gbit/s",
    ]


def test_a_search_says_so_of_the_nodes_that_it_has() -> None:
    """A plan may use some of the groups alone."""
    one = experiment()
    node = kinds(one)[0]

    def named(name: str, **links: PairLink) -> NodeKind:
        return replace(node, name=name, links=links)

    link = PairLink(gbit_per_s=1)
    three = [named("a", b=link, c=link), named("b", a=link), named("c", a=link)]
    assert any("cluster.links.b.c" in doubt for doubt in doubts(Training.of(one), three, set()))
    assert not any("cluster.links" in doubt for doubt in doubts(Training.of(one), three[:2], set()))
