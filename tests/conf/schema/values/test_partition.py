"""Partitions and node orders: text becomes a value, and a value becomes the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.schema.values.partition import NodeOrder, Partition

STAGES = st.lists(st.integers(0, 999), min_size=1, max_size=16).map(tuple)
NAMES = st.text("abzAZ09_.-", min_size=1, max_size=6)
GROUPS = st.lists(NAMES, min_size=1, max_size=16).map(tuple)


@given(STAGES)
def test_a_partition_survives_being_written(layers: tuple[int, ...]) -> None:
    assert Partition.parse(str(Partition(layers))) == Partition(layers)


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "1--1", "1,2", "1 - 2", "1.5", "a", "1-1\n", "1-1000000", "١-٢"])
def test_what_is_not_a_partition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a partition"):
        Partition.parse(text)


@given(st.integers(1, 500), st.integers(1, 64))
def test_an_even_partition_has_all_layers_and_differs_by_one_at_most(layers: int, stages: int) -> None:
    parts = Partition.even(layers, stages).layers
    assert (sum(parts), len(parts)) == (layers, stages)
    assert max(parts) - min(parts) <= 1
    assert parts == tuple(sorted(parts, reverse=True))


@given(STAGES, st.integers(1, 999))
def test_a_fitted_partition_has_all_layers_in_as_many_stages(layers: tuple[int, ...], wanted: int) -> None:
    fitted = Partition(layers).fitted(wanted)
    assert (sum(fitted.layers), len(fitted.layers)) == (wanted, len(layers))
    assert min(fitted.layers) >= 0


@given(STAGES.filter(any), st.integers(1, 999))
def test_no_partition_that_fits_is_nearer_and_empty_stages_stay_empty(layers: tuple[int, ...], wanted: int) -> None:
    fitted = Partition(layers).fitted(wanted)
    moved = sum(abs(new - old) for new, old in zip(fitted.layers, layers, strict=True))
    assert moved == abs(wanted - sum(layers)), "a layer more or less in all is at least one moved"
    assert all(new == 0 for new, old in zip(fitted.layers, layers, strict=True) if old == 0)


@given(GROUPS)
def test_a_node_order_survives_being_written(groups: tuple[str, ...]) -> None:
    assert NodeOrder.parse(str(NodeOrder(groups))) == NodeOrder(groups)


@given(st.dictionaries(st.sampled_from(["hgx", "gpu2", "a.b-c"]), st.integers(1, 9), min_size=1))
def test_the_order_of_all_nodes_is_group_after_group(counts: dict[str, int]) -> None:
    text = "+".join(f"{name}*{count}" for name, count in counts.items())
    assert NodeOrder.of(counts) == NodeOrder.parse(text)


def test_a_node_order_writes_runs_with_a_count() -> None:
    assert str(NodeOrder(("hgx", "gpu2", "gpu2", "hgx"))) == "hgx+gpu2*2+hgx"


@pytest.mark.parametrize("text", ["", "+", "a+", "a*", "a*0", "a*-1", "a*1000000", "a b", "a**2", "2*a"])
def test_what_is_not_a_node_order_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a node order"):
        NodeOrder.parse(text)
