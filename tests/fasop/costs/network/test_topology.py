"""Leaf switches: how fast messages are whose ranks share uplinks, held against a max-min fair division of all links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.values.topology import Uplink
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.network.placement import stage_nodes
from fasop.costs.training import Training
from fasop.simulation.pipelines import Pipelines
from fasop.simulation.predict import predict
from tests.support.fasop.plans import kinds, mixed, pipelines
from tests.support.fasop.random_clusters import with_uplinks
from tests.support.fasop.searches import against_brute_force

NODE, BYTES = 40.0, 1024 * 1600 * 4
"""Gbit/s out of a node, and GPT-2 XL's activations in fp32."""
Flow = tuple[int, int]
"""From which node to which."""


def slowest_rate(flows: Sequence[Flow], leaf: Sequence[str | None], uplinks: dict[str, float]) -> float:
    """Gbit/s of the slowest flow between nodes if all rates rise together until a link is full, whose flows then keep
    theirs (progressive filling; Bertsekas and Gallager 1992, 6.5.2)."""
    links: dict[tuple[str, object], float] = {}
    passed: list[set[tuple[str, object]]] = []
    for here, there in flows:
        own: dict[tuple[str, object], float] = {("out", here): NODE, ("in", there): NODE}
        if leaf[here] != leaf[there]:
            own |= {("up", name): uplinks[name] for name in [leaf[here]] if name is not None}
            own |= {("down", name): uplinks[name] for name in [leaf[there]] if name is not None}
        links |= own
        passed.append({*own})
    rates, left, open_ = np.zeros(len(flows)), dict(links), {*range(len(flows))}
    while open_:
        users = Counter(link for flow in open_ for link in passed[flow])
        step = min(left[link] / count for link, count in users.items())
        for link, count in users.items():
            left[link] -= step * count
        rates[[*open_]] += step
        open_ -= {flow for flow in open_ if any(left[link] < 1e-9 for link in passed[flow])}
    return float(rates.min())


def nodes_of(names: str, uplinks: dict[str, float], leaves: dict[str, str]) -> list[NodeKind]:
    """Kinds of A10 nodes, of four GPUs each, with the bandwidth `NODE`."""
    a10 = kinds(mixed())[1]
    return [
        replace(
            a10,
            name=name,
            group=replace(a10.group, count=names.count(name), inter_gbit_per_s=NODE),
            uplink=Uplink(leaves[name], uplinks[leaves[name]]) if name in leaves else None,
        )
        for name in sorted({*names})
    ]


def placed(names: str, some: list[NodeKind], tensor: int, data: int) -> Pipelines:
    whole, gpus = Training.of(mixed()), 4 * len(names)
    sizes = {"tensor": tensor, "data": data, "pipeline": gpus // tensor // data, "global_batch_size": 8}
    order = [[kind.name for kind in some].index(name) for name in names]
    return pipelines(replace(whole, parallel=replace(whole.parallel, **sizes)), some, np.array([order]))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.permutations("aabbccdd"),
    st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (4, 2), (2, 4), (1, 8)]),
    st.floats(5, 400),
    st.floats(5, 400),
)
def test_messages_take_as_long_as_the_slowest_of_a_max_min_fair_division(
    names: list[str], sizes: tuple[int, int], first: float, second: float
) -> None:
    """Of two leaves with one and two groups; the nodes of the fourth group hang on the core."""
    uplinks, leaves = {"x": first, "y": second}, {"a": "x", "b": "y", "c": "y"}
    tensor, data = sizes
    lines = placed("".join(names), nodes_of("".join(names), uplinks, leaves), tensor, data)
    ranks, of_leaf = stage_nodes([4] * 8, tensor, data, lines.stages), [leaves.get(name) for name in names]
    for stage in range(lines.stages - 1):
        pairs = zip(ranks[stage], ranks[stage + 1], strict=True)
        flows = [(here, there) for here, there in pairs if here != there]
        if flows:
            seconds = 20e-6 + BYTES * 8e-9 / slowest_rate(flows, of_leaf, uplinks)
            assert lines.hop[stage, 0] == pytest.approx(seconds, rel=1e-9)


def test_rings_over_two_leaves_share_the_uplinks() -> None:
    """Eight replicas of tensor groups of four, a node each: four rings leave each leaf once, as they leave each node.
    If two stages have four replicas each and both lie on both leaves, eight rings do. (Latencies stay.)"""
    leaves = {"a": "x", "b": "y"}
    for order, data in (("aaaabbbb", 8), ("aabbaabb", 4)):
        alone, slow, wide = (
            placed(order, nodes_of(order, {"x": rate, "y": 1e6}, leaves), 4, data).sums.layer[:, 0]
            for rate in (1e6, NODE / 5, 4 * NODE)
        )
        stages = 8 // data
        assert slow / alone == pytest.approx([5 * stages] * stages, rel=0.03)
        assert wide == pytest.approx(alone)


def test_a_leaf_with_all_nodes_changes_nothing() -> None:
    for tensor, data in ((1, 2), (4, 2), (2, 8)):
        plain, under = (
            placed("aabbaabb", nodes_of("aabb" * 2, {"x": 1.0}, leaves), tensor, data)
            for leaves in ({}, {"a": "x", "b": "x"})
        )
        for name in ("hop", "embedding"):
            assert getattr(under, name) == pytest.approx(getattr(plain, name))
        assert under.sums.layer == pytest.approx(plain.sums.layer)


@pytest.mark.slow
def test_the_best_plan_is_that_of_brute_force_with_uplinks() -> None:
    assert sum(one.total != plain.total for one, plain in against_brute_force(14, 40, with_uplinks)) > 2


def test_a_plan_on_some_of_the_groups_has_their_part_of_the_topology() -> None:
    words = ("cluster=a10_zones", "model=xl", "train.precision=fp16", "executor=slurm", "parallel.micro_batch_size=1")
    leaves = "+cluster.topology={one: {groups: [east], gbit_per_s: 1}, two: {groups: [west], gbit_per_s: 100}}"
    sizes = ("parallel.global_batch_size=8", "parallel.tensor=1", "parallel.data=4", "parallel.pipeline=4")
    within, across, alone = (
        predict(compose([*words, *sizes, *more, f"parallel.node_order={order}", "parallel.partition=null"])).iteration_s
        for order, more in (("west*4", (leaves,)), ("west*2+east*2", (leaves,)), ("west*4", ()))
    )
    assert within == alone
    assert 1.3 * within < across


@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        ("{one: {groups: [eats], gbit_per_s: 1}}", "cluster.topology.one.groups: 'eats' is not a node group"),
        ("{one: {groups: [], gbit_per_s: 1}}", "cluster.topology.one.groups is empty"),
        ("{one: {groups: [east], gbit_per_s: 0}}", "cluster.topology.one.gbit_per_s=0"),
        (
            "{one: {groups: [east], gbit_per_s: 1}, two: {groups: [west, east], gbit_per_s: 1}}",
            "cluster.topology.two.groups: cluster.topology.one has 'east', too",
        ),
        ("{one: {groups: [east, east], gbit_per_s: 1}}", "has 'east', too"),
        ("{one: {groups: [east]}}", "cluster.topology.one.gbit_per_s"),
        ("{one: {groups: [east], gbits: 1}}", "gbits"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(leaves: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        node_kinds(compose(["cluster=a10_zones", f"+cluster.topology={leaves}"]).cluster)
