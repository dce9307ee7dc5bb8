"""What bytes between groups of nodes cost: counted by hand, and weighed by a front."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from fasop.costs.training import PlacedTraining
from fasop.search.arguments import Arguments, First
from fasop.search.front import COST
from fasop.search.front_search import front
from fasop.search.inputs import read
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.node_sets import clusters
from fasop.search.traffic import bytes_between_ranks, dollars_per_step
from fasop.simulation.predict import planned
from launch.control.planning.plan import make_plan
from tests.fasop.search.test_pareto import ONCE, ONE_F_ONE_B, WORDS
from tests.support.fasop.plans import mixed

PRICED = "+cluster.links={hgx: {gpu2: {price_per_gb: 2}}, gpu2: {hgx: {price_per_gb: 3}}}"
ORDER = "parallel.node_order=hgx+gpu2*7"
ACTIVATIONS = 1024 * 1600 * 4
WORD = 50304 * 1600 * 4
"""Bytes of the embedding's gradient, in fp32, with a padded vocabulary."""


def plan(*words: str) -> PlacedTraining:
    return planned(mixed(ORDER, PRICED, *words))


def test_messages_and_the_embeddings_gradients_leave_the_first_node_in_both_directions() -> None:
    """64 micro-batches go on from the first stage, and come back; four replicas sum the embedding with the last one."""
    each_way = 64 * ACTIVATIONS + 4 * WORD
    assert dollars_per_step(plan()) == pytest.approx((2 + 3) * each_way / 1e9)


def test_a_ring_leaves_a_node_and_comes_back() -> None:
    """One stage of 32 replicas: of the ring two links are between the groups, one each way."""
    one = plan("parallel.pipeline=1", "parallel.data=32", "parallel.partition=48")
    parameters = one.training.model.parameters()
    assert dollars_per_step(one) == pytest.approx((2 + 3) * 2 * 31 / 32 * parameters * 4 / 1e9, rel=1e-3)
    zero = replace(one.training.parallel, sharded_optimizer=True)
    sharded = replace(one, training=replace(one.training, parallel=zero))
    assert dollars_per_step(sharded) == pytest.approx(dollars_per_step(one))  # fp32: a half each


def test_what_stays_within_a_node_costs_nothing() -> None:
    """A group's price is that between two of its nodes: of the ring of 32 ranks six links are between the A10 nodes."""
    one = plan("parallel.pipeline=1", "parallel.data=32", "parallel.partition=48")
    own = "+cluster.links={gpu2: {gpu2: {price_per_gb: 1}}}"
    priced = planned(mixed(ORDER, own, "parallel.pipeline=1", "parallel.data=32", "parallel.partition=48"))
    assert dollars_per_step(priced) == pytest.approx(6 / (2 + 3) * dollars_per_step(one))


def test_scattered_messages_cost_a_part() -> None:
    words = ("parallel.tensor=4", "parallel.data=1", "parallel.pipeline=8", "parallel.partition=6-6-6-6-6-6-6-6")
    whole, parts = plan(*words), plan(*words, "parallel.scatter_messages=true")
    saved = dollars_per_step(whole) - dollars_per_step(parts)
    assert saved == pytest.approx((2 + 3) * 64 * 3 * ACTIVATIONS / 1e9)


def test_unlike_replicas_share_the_micro_batches_out() -> None:
    """Every micro-batch crosses each cut once there and once back, whoever takes it."""
    words = ("parallel.replicas=4-2-26", "parallel.pipeline=3", "parallel.partition=16-24-8", "parallel.data=1")
    one = plan(*words, "parallel.global_batch_size=52")
    layout, found = one.training.parallel.layout, bytes_between_ranks(one)
    crossing = sum(
        size for (a, b), size in found.items() if (layout.stage_dp_tp(a)[0], layout.stage_dp_tp(b)[0]) == (0, 1)
    )
    assert crossing == pytest.approx(52 * ACTIVATIONS)


def test_without_a_price_nothing_changes() -> None:
    assert dollars_per_step(planned(mixed(ORDER))) == 0.0
    with pytest.raises(ConfigError, match=r"price_per_gb=-1\.0 must be a number, at least 0"):
        compose(["experiment=seed_a100x1_a10x7", PRICED.replace("2}", "-1}")])


def test_the_plan_of_a_limited_run_has_the_price_of_its_iterations() -> None:
    limited = ("train.max_cost=5", "cluster.groups.hgx.price_per_hour=1", "cluster.groups.gpu2.price_per_hour=1")
    assert make_plan(mixed(ORDER, PRICED, *limited), "a/run").train.traffic_price == dollars_per_step(plan())
    assert make_plan(mixed(ORDER, *limited), "a/run").train.traffic_price is None
    assert make_plan(mixed(ORDER, PRICED), "a/run").train.traffic_price is None


ZONES = ("cluster=a10_zones", "cluster.groups.east.count=1", "cluster.groups.west.count=1", "model=tiny")
GOES = ("+cluster.links.east.west.price_per_gb=2", "+cluster.links.west.east.price_per_gb=3")


WHOLE = 128 * 64 + 2 * 64 + 4 * 6 * 64
"""Positions, norms and biases of model=tiny."""
BLOCKS = 128 * 64 + 2 * 64 + 4 * (12 * 64**2 + 13 * 64)
"""Its parameters without words."""
EQUAL = ("parallel.partition=4", "parallel.tensor=1", "parallel.data=8", "parallel.pipeline=1")
OWN = ("parallel.partition=1-1-1-1/2-2", "parallel.tensor=1/2", "parallel.data=2", "parallel.pipeline=4")


@pytest.mark.parametrize(
    ("words", "islands", "weights"),
    [
        pytest.param(EQUAL, 8, BLOCKS + 384 * 64, id="replicas"),
        pytest.param(OWN, 2, BLOCKS + 2 * 512 * 64 + WHOLE, id="own-plans"),
    ],
)
def test_islands_pay_for_what_they_send_each_other_once_in_many_iterations(
    words: tuple[str, ...], islands: int, weights: int
) -> None:
    """Each island is in one zone, so that only the ring of their common step passes the priced links. Both the first
    and the last stage send the padded words; what a tensor group does not share out, both of its ranks."""
    for steps in (10, 100):
        config = compose([*ZONES, *GOES, *words, "train.max_cost=5", f"train.sync_every={steps}"])
        of_all = (2 + 3) * 2 * (islands - 1) / islands * weights * 4 / 1e9
        assert make_plan(config, "a/run").train.traffic_price == pytest.approx(of_all / steps, rel=1e-6)


def test_a_front_weighs_what_is_sent() -> None:
    """The cheapest plan is that of all that were looked at; the fastest one, on several nodes, costs more than without
    the price."""
    links = (
        "+cluster.links={a100: {a10: {price_per_gb: 0.1}}, a10: {a100: {price_per_gb: 0.1}, a10: {price_per_gb: 0.1}}}"
    )
    inputs, free = read([*WORDS, ONE_F_ONE_B, links]), read([*WORDS, ONE_F_ONE_B])
    every = Best(100_000)
    explore([Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)], every)
    found = front(inputs, Arguments(pareto=First.cost)).plans
    assert COST.known(found[0], ONCE) <= min(COST.known(plan, ONCE) for plan in every.plans) * (1 + 1e-9)
    fastest = front(free, Arguments(pareto=First.cost)).plans[-1]
    assert COST.known(found[-1], ONCE) > COST.known(fastest, ONCE)
    times = [plan.total for plan in found]
    assert times == sorted(times, reverse=True)
