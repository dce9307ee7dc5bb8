"""What a table of pairs makes of messages and gradients, held against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema.experiment import Experiment
from conf.schema.values.links import PairLink
from fasop.costs.hardware import Factors
from fasop.costs.network.links import transfer_s
from fasop.costs.training import Training
from fasop.simulation.pipelines import Pipelines
from tests.support.fasop.plans import column, kinds, mixed, pipelines
from tests.support.fasop.random_clusters import all_sizes, random_case
from tests.support.fasop.seeds import seeds

SIZE = 1024 * 1600 * 4
"""Bytes of GPT-2 XL's activations in fp32."""
TWO_WAYS = (
    "+cluster.links={hgx: {gpu2: {gbit_per_s: 10, latency_us: 100}}, gpu2: {hgx: {gbit_per_s: 5}, "
    "gpu2: {gbit_per_s: 80}}}"
)
POINTS = PairLink(gbit_per_s_by_bytes=((1000, 1.0), (10_000, 4.0), (100_000, 8.0)))


def lines(one: Experiment, order: list[int], **sizes: object) -> Pipelines:
    whole = Training.of(one)
    return pipelines(
        replace(whole, parallel=replace(whole.parallel, **sizes)),  # type: ignore[arg-type]
        kinds(one),
        np.array([order]),
    )


def test_messages_take_their_pairs_link_in_their_direction() -> None:
    """What an entry leaves out is the groups' own: 20 us."""
    one = lines(mixed(TWO_WAYS), [1, 0, 1, 1, 1, 1, 1, 1], data=1, tensor=4)
    hop, back = one.hop[:, 0], one.messages_back(column(*[6] * 8))[0][:, 0]
    to_hgx, from_hgx, apart = (
        latency * 1e-6 + 4 * SIZE * 8e-9 / rate for latency, rate in ((20, 5), (100, 10), (20, 80))
    )
    assert hop[:3] == pytest.approx([to_hgx, from_hgx, apart])
    assert back[:3] == pytest.approx([from_hgx, to_hgx, apart])
    times = one.loaded(column(*[6] * 8)).times
    assert times.send_backward[1:4, 0] == pytest.approx(back[:3])


def test_the_slowest_pair_of_a_stage_counts_and_so_does_that_of_its_ring() -> None:
    """Stages on two nodes each: the first stage's replicas lie on both kinds, and so do its gradients."""
    one = lines(mixed(TWO_WAYS), [0, *[1] * 7], data=8, pipeline=4, tensor=1, global_batch_size=8)
    own = lines(mixed(), [0, *[1] * 7], data=8, pipeline=4, tensor=1, global_batch_size=8)
    hop = one.hop[:, 0]
    assert hop[0] == pytest.approx(100e-6 + 4 * SIZE * 8e-9 / 10)
    assert hop[1] == hop[2] == pytest.approx(20e-6 + 4 * SIZE * 8e-9 / 80)
    # a ring goes both ways between two nodes: the slower direction of 5 Gbit/s against both groups' 40
    assert one.sums.layer[0] / own.sums.layer[0] == pytest.approx(40 / 5, rel=0.01)
    assert own.sums.layer[1] / one.sums.layer[1] == pytest.approx(80 / 40, rel=0.03)


@given(st.floats(1, 1e7))
def test_a_larger_message_takes_longer(size: float) -> None:
    seconds, more = transfer_s(POINTS, size), transfer_s(POINTS, 1.01 * size)
    assert seconds is not None
    assert more is not None
    assert seconds < more <= 1.01 * seconds * (1 + 1e-12)


@pytest.mark.parametrize(
    ("size", "us"),
    [(500, 4.0), (1000, 8.0), (5500, 14.0), (10_000, 20.0), (55_000, 60.0), (100_000, 100.0), (200_000, 200.0)],
)
def test_between_points_time_is_linear_and_beyond_them_bandwidth_is_the_points(size: int, us: float) -> None:
    assert transfer_s(POINTS, size) == pytest.approx(us * 1e-6)


def test_bandwidth_is_that_of_the_size_of_each_message() -> None:
    """6.5536 MB of activations; gradients in buckets of 16 MiB, of which a step of 4 replicas' ring sends a fourth."""
    points = f"{{gbit_per_s_by_bytes: {{{4 * 2**20}: 30, {SIZE}: 40}}}}"
    words = f"+cluster.links={{gpu2: {{gpu2: {points}}}, hgx: {{hgx: {points}, gpu2: {points}}}}}"
    with_back = words.replace("gpu2: {gpu2: " + points + "}", "gpu2: {gpu2: " + points + ", hgx: " + points + "}")
    one = lines(mixed(with_back), [1, 1, 1, 1, 0, 1, 1, 1], data=4, pipeline=2, tensor=4, global_batch_size=8)
    plain = lines(mixed(), [1, 1, 1, 1, 0, 1, 1, 1], data=4, pipeline=2, tensor=4, global_batch_size=8)
    assert one.hop == pytest.approx(plain.hop)  # 40 Gbit/s in both
    assert one.busy == pytest.approx(plain.busy)
    assert one.sums.layer / plain.sums.layer == pytest.approx(np.full_like(plain.sums.layer, 40 / 30), rel=0.01)
    assert one.back is None  # directions are alike


def test_a_table_of_the_groups_own_figures_changes_nothing() -> None:
    """To the last bit, whatever the sizes."""
    tried = 0
    for seed in seeds(10):
        training, nodes, choices = random_case(np.random.default_rng(seed))
        named = [
            replace(kind, links={other.name: PairLink() for other in nodes}, factors=Factors(messages=2.0))
            for kind in nodes
        ]
        own = [replace(kind, factors=Factors(messages=2.0)) for kind in nodes]
        orders = np.array([[number for number, kind in enumerate(nodes) for _ in range(kind.group.count)]])
        for sized in all_sizes(training, nodes, choices):
            one, other = pipelines(sized, own, orders), pipelines(sized, named, orders)
            for name in ("hop", "busy", "embedding"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
            assert np.array_equal(one.sums.layer, other.sums.layer)
            assert other.back is None
            tried += 1
    assert tried > 100
