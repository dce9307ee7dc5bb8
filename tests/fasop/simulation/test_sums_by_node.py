"""What sums of gradients within nodes first take, where they are chosen, and that no bound is above them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conf.schema.cluster import NodeGroup
from conf.schema.experiment import Experiment
from fasop.costs.memory import allowance
from fasop.costs.network.links import Link
from fasop.costs.network.placement import place
from fasop.costs.training import Training
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.simulation.nodes import Nodes
from fasop.simulation.predict import predict
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from tests.support.cases import fewer
from tests.support.fasop.plans import experiment, kinds, mixed
from tests.support.fasop.random_clusters import best_times, random_case, with_links
from tests.support.fasop.searches import floor
from tests.support.fasop.seeds import seeds

BY_NODE = "parallel.hierarchical_reduce=true"
OF_EIGHT = (
    "parallel.tensor=1", "parallel.data=8", "parallel.pipeline=4", "parallel.partition=12-12-12-12",
    "parallel.global_batch_size=32", "data.prefix=data/none",
)  # fmt: skip
"""Two nodes of four A10 a stage."""
LINKS = {"hgx.intra": 60, "hgx.inter": 10, "gpu2.intra": 128, "gpu2.inter": 10}
ROUNDING = 1e-9


def sums(one: Experiment) -> Link[np.ndarray]:
    """Of all stages in the first order of nodes."""
    names = [kind.name for kind in kinds(one)]
    order = np.array([[names.index(group) for group in one.node_order.groups]])
    return Nodes(kinds(one), order).links_of(Training.of(one)).sums


def group(one: Experiment) -> NodeGroup:
    (found,) = one.cluster.groups.values()
    return found


def plan(*words: str) -> Plan:
    return make_plan(experiment(*OF_EIGHT, *words), "test/by-node")


@pytest.mark.parametrize(
    ("gpus", "tensor", "data", "pipeline", "spread"),
    [
        ((4,) * 8, 1, 8, 4, [(2, 4)] * 4),
        ((4,) * 8, 2, 8, 2, [(4, 2)] * 2),
        ((4,) * 8, 4, 8, 1, [(1, 1)]),
        ((4,) * 8, 1, 4, 8, [(1, 1)] * 8),
        ((4, 2, 2, 4), 1, 4, 3, [(1, 1), (2, 2), (1, 1)]),
        ((3, 1, 2, 2), 1, 4, 2, [(1, 1), (2, 2)]),
    ],
    ids=["two-nodes", "tensor", "one-each", "one-node", "ends-on-one", "3-1"],
)
def test_a_stage_is_spread_where_all_its_nodes_have_as_many_replicas(
    gpus: tuple[int, ...], tensor: int, data: int, pipeline: int, spread: list[tuple[int, int]]
) -> None:
    assert place(gpus, tensor, data, pipeline).spread.tolist() == [[*one] for one in spread]


@pytest.mark.parametrize("links", [(), ("+cluster.links={gpu2: {gpu2: {gbit_per_s: 40, latency_us: 20}}}",)], ids=len)
def test_it_takes_what_its_three_steps_take_one_after_another(links: tuple[str, ...]) -> None:
    """Of 4 on each of 2 nodes: 3 steps of a fourth within and one of an eighth across, which 4 rings share, and back. A
    ring of all has 2 * 7 steps of an eighth."""
    ring, found = sums(experiment(*OF_EIGHT, *links)), sums(experiment(*OF_EIGHT, *links, BY_NODE))
    own = group(experiment(*OF_EIGHT))
    within, across = 8e-9 / own.intra_gbit_per_s, 8e-9 / own.inter_gbit_per_s
    assert 2 * 7 / 8 * found.s_per_byte == pytest.approx(np.full((4, 1), 2 * (3 / 4 * within + 4 * across / 8)))
    assert 2 * 7 * found.latency_s == pytest.approx(
        np.full((4, 1), 2e-6 * (3 * own.intra_latency_us + own.inter_latency_us))
    )
    assert (found.s_per_byte < ring.s_per_byte).all()
    assert (found.latency_s < ring.latency_s).all()


def test_a_plan_takes_it_where_links_between_nodes_are_slow() -> None:
    """Those within must be as many times quicker as there are nodes: 128 Gbit/s are not twice 70."""
    assert plan(BY_NODE).hierarchical_stages == [0, 1, 2, 3]
    assert len(plan(BY_NODE).by_node) == 4
    assert plan().hierarchical_stages is None
    assert plan(BY_NODE, "cluster.groups.gpu2.inter_gbit_per_s=70").hierarchical_stages is None
    assert plan(BY_NODE, "parallel.data=4", "parallel.pipeline=8", "parallel.partition=6-6-6-6-6-6-6-6").by_node == []


def test_an_iteration_is_predicted_shorter_with_slow_links_and_no_longer_with_quick_ones() -> None:
    slow = "cluster.groups.gpu2.inter_gbit_per_s=4"
    seconds = [predict(experiment(*OF_EIGHT, slow, *words)).iteration_s for words in ((), (BY_NODE,))]
    assert seconds[1] < 0.9 * seconds[0]
    quick = "cluster.groups.gpu2.inter_gbit_per_s=400"
    seconds = [predict(experiment(*OF_EIGHT, quick, *words)).iteration_s for words in ((), (BY_NODE,))]
    assert seconds[1] == seconds[0]


def test_a_stage_on_several_kinds_of_nodes_is_as_fast_as_the_slowest_link_of_each_step() -> None:
    words = ("parallel.tensor=1", "parallel.data=16", "parallel.pipeline=2", "parallel.partition=24-24", BY_NODE)
    slow = [f"cluster.groups.{name}_gbit_per_s={rate}" for name, rate in LINKS.items()]
    first, last = sums(mixed(*words, "parallel.global_batch_size=32", *slow)).s_per_byte[:, 0]
    assert 15 / 16 * first == pytest.approx(3 / 4 * 8e-9 / 60 + 3 / 4 * 8e-9 / 10)
    assert 15 / 16 * last == pytest.approx(3 / 4 * 8e-9 / 128 + 3 / 4 * 8e-9 / 10)


@pytest.mark.slow
@pytest.mark.parametrize("linked", [False, True], ids=["groups", "pairs"])
def test_no_plan_beats_its_bound_and_the_search_finds_the_best(linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is slower than without it, where its communicators take no memory."""
    monkeypatch.setattr(allowance, "communicators", lambda _: 5)
    tried = shorter = 0
    for seed in seeds(fewer(40, 60)):
        rng = np.random.default_rng(seed)
        training, nodes, choices = random_case(rng)
        nodes = with_links(rng, nodes) if linked else nodes
        by_node = replace(training, parallel=replace(training.parallel, hierarchical_reduce=True))
        best = best_times(by_node, nodes, choices)
        if not best or not np.isfinite(least := min(seconds for _, seconds in best)):
            continue
        keep = Best(1)
        explore([Space(by_node, nodes, choices)], keep)
        assert keep.plans[0].total == pytest.approx(least, rel=ROUNDING)
        assert all(floor(sized, nodes) <= seconds * (1 + ROUNDING) for sized, seconds in best)
        plain = best_times(training, nodes, choices)
        assert plain is not None
        assert all(one <= other * (1 + ROUNDING) for (_, one), (_, other) in zip(best, plain, strict=True))
        shorter += any(one < other * (1 - 1e-6) for (_, one), (_, other) in zip(best, plain, strict=True))
        tried += 1
    assert tried > 5
    assert shorter
