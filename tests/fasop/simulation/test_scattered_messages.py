"""Messages that a tensor group scatters, as predictions and searches price them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conf.schema.experiment import EngineKind
from fasop.costs.training import Training
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.simulation.predict import planned, predict_plan
from fasop.simulation.ranks.heterogeneous_stages import cuts_scattered
from tests.support.cases import fewer
from tests.support.fasop.plans import experiment, kinds, mixed, pipelines
from tests.support.fasop.random_clusters import best_times, random_case, with_collectives, with_links
from tests.support.fasop.searches import floor
from tests.support.fasop.seeds import seeds

SIZES = {"pipeline": 4, "data": 2, "tensor": 4}
BYTES = 1024 * 1600 * 4
"""Of GPT-2 XL's activations in fp32."""


def lines(way: str, **sizes: object) -> tuple[np.ndarray, np.ndarray]:
    """The hops of a plan of 4 stages on two nodes of 4 A10 each, and how long they occupy the link."""
    one = experiment("parallel.global_batch_size=64")
    training = Training.of(one)
    parallel = replace(training.parallel, **{**SIZES, **sizes}, scatter_messages=way)  # type: ignore[arg-type]
    found = pipelines(replace(training, parallel=parallel), kinds(one), np.zeros((1, 8), int))
    return found.hop[:, 0], found.busy[:, 0]


def test_a_rank_sends_its_part_and_its_group_gathers_the_whole() -> None:
    """Four ranks share 40 Gbit/s with 20 us; a ring of three steps of a fourth in the node, 128 Gbit/s with 10 us."""
    hop, busy = lines("true")
    sent = 20e-6 + BYTES * 8e-9 / 40
    assert hop == pytest.approx(np.full(4, sent + 3 * (10e-6 + BYTES / 4 * 8e-9 / 128)))
    assert busy == pytest.approx(np.full(4, BYTES * 8e-9 / 40))
    whole, occupied = lines("false")
    assert whole == pytest.approx(np.full(4, 20e-6 + 4 * BYTES * 8e-9 / 40))
    assert occupied == pytest.approx(4 * busy)
    assert np.array_equal(lines("auto")[0], hop)


@pytest.mark.parametrize("sizes", [{"tensor": 1, "data": 8}, {"sequence_parallel": True}], ids=str)
def test_where_ranks_have_no_common_message_nothing_changes_to_the_bit(sizes: dict[str, object]) -> None:
    for way in ("true", "auto"):
        assert np.array_equal(lines(way, **sizes)[0], lines("false", **sizes)[0])


def test_within_a_node_auto_leaves_messages_whole() -> None:
    """Two stages of two ranks on each node: every second cut lies in it."""
    words = ("parallel.tensor=2", "parallel.data=1", "parallel.pipeline=16", f"parallel.partition={'-'.join(16 * '3')}")
    auto = planned(experiment(*words, "parallel.scatter_messages=auto"))
    assert cuts_scattered(auto) == [*range(1, 15, 2)]
    true = planned(experiment(*words, "parallel.scatter_messages=true"))
    assert cuts_scattered(true) == [*range(15)]
    false = planned(experiment(*words))
    assert cuts_scattered(false) == []
    times = [predict_plan(one).iteration_s for one in (auto, true, false)]
    assert times[0] <= min(times[1:])
    assert times[0] < times[2]


def test_other_engines_are_priced_as_they_send() -> None:
    """Megatron-Core sends whole messages."""
    words = ("parallel.tensor=4", "parallel.data=2", "parallel.pipeline=4", "parallel.partition=12-12-12-12")
    placed = planned(experiment(*words))
    core = replace(placed.training, engine=replace(placed.training.engine, kind=EngineKind.megatron_core))
    auto = replace(core, parallel=replace(core.parallel, scatter_messages="auto"))
    seconds = [predict_plan(replace(placed, training=one)).iteration_s for one in (auto, core)]
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize("drawn", ["plain", "links", "collectives"])
@pytest.mark.slow
def test_the_best_plan_is_that_of_brute_force(drawn: str) -> None:
    """With scattering wherever it helps; no plan is below its bound, and the replay agrees."""
    tried, changed = 0, 0
    for seed in seeds(fewer(20, 60)):
        rng = np.random.default_rng(seed)
        training, nodes, choices = random_case(rng)
        if drawn != "plain":
            nodes = (with_links if drawn == "links" else with_collectives)(rng, nodes)
        auto = replace(training, parallel=replace(training.parallel, scatter_messages="auto"))
        best = best_times(auto, nodes, choices)
        if not best or not np.isfinite(least := min(seconds for _, seconds in best)):
            continue
        keep, plain = Best(1), Best(1)
        explore([Space(auto, nodes, choices)], keep)
        explore([Space(training, nodes, choices)], plain)
        assert keep.plans[0].total == pytest.approx(least, rel=1e-9)
        assert keep.plans[0].total <= plain.plans[0].total * (1 + 1e-9)
        assert all(floor(sized, nodes) <= seconds * (1 + 1e-9) for sized, seconds in best)
        assert predict_plan(keep.plans[0]).iteration_s == pytest.approx(keep.plans[0].total, rel=1e-9)
        changed += any(one.scatters_messages for one, _ in best)
        tried += 1
    assert tried > 4
    assert changed > 0


def test_a_plan_of_unlike_nodes_and_replicas_is_priced_and_replayed() -> None:
    words = ("parallel.tensor=2", "parallel.replicas=2-3-1", "parallel.pipeline=3", "parallel.partition=16-24-8")
    order = ("parallel.node_order=hgx+gpu2*2", "parallel.global_batch_size=48")
    whole, auto = (
        predict_plan(planned(mixed(*words, *order, f"parallel.scatter_messages={way}"))).iteration_s
        for way in ("false", "auto")
    )
    assert auto < whole
    placed = planned(mixed(*words, *order, "parallel.scatter_messages=auto"))
    assert cuts_scattered(placed) == [0, 1]
