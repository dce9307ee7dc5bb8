"""Measured collectives: interpolated over sizes and numbers of ranks, and what predictions make of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from fasop.costs.hardware import NodeKind
from fasop.costs.network.collectives import Collectives, Curve, Exchange
from fasop.costs.network.links import Link
from fasop.costs.profiles.doubts import doubts, profile_doubts
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from fasop.costs.training import Training
from fasop.simulation.predict import planned, predict_plan
from tests.support.fasop.plans import column, experiment, kinds, pipelines

H20 = {
    32768: 18.66, 65536: 18.95, 131072: 19.25, 262144: 19.54, 524288: 20.39, 1048576: 27.76, 2097152: 40.66,
    4194304: 53.24, 8388608: 81.16, 16777216: 121.33, 33554432: 195.40,
}  # fmt: skip
"""All-reduces of 8 GPUs that nccl-tests measured out of place: github.com/kvcache-ai/Mooncake, pull request 3484."""
SIZES = [1 << power for power in range(10, 29)]
TIMES = {operation: Link(latency_s=2e-5, s_per_byte=1e-10) for operation in Operation}


def ring(operation: Operation, ranks: int, size: float, link: Link[float]) -> float:
    """Seconds by formula."""
    match operation:
        case Operation.all_reduce:
            return link.all_reduce(ranks).takes(size)
        case Operation.send_recv:
            return link.takes(size)
    return link.all_gather(ranks).takes(size)


def sampled(
    operation: Operation, ranks: int, link: Link[float], nodes: int = 1, sizes: list[int] = SIZES
) -> CollectiveTimes:
    times = {size: 1e6 * ring(operation, ranks, size, link) for size in sizes}
    return CollectiveTimes(operation=operation, ranks=ranks, nodes=nodes, us_by_bytes=times)


def takes(known: Collectives, operation: Operation, ranks: int, size: float, *, between: bool = False) -> float:
    link = known.link(Exchange(operation, ranks, size), gpus=8, between=between)
    assert link is not None
    return ring(operation, ranks, size, link)


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_real_log_is_met_within_10_percent_at_sizes_left_out(left_out: int) -> None:
    kept = {size: us for number, (size, us) in enumerate(H20.items()) if number % 2 != left_out}
    curve = Curve(kept)
    for size, us in H20.items():
        if 65536 <= size <= 16777216:
            assert np.exp(curve.at(size).log_s) * 1e6 == pytest.approx(us, rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(1, 2**30), st.floats(0.1, 1e6)), min_size=2, max_size=12, unique_by=lambda one: one[0]
    )
)
def test_times_never_fall_with_the_size_nor_grow_faster_than_between_points(points: list[tuple[int, float]]) -> None:
    curve = Curve(dict(points))
    found = [curve.at(size).log_s for size in np.geomspace(0.5, 2**31, 200)]
    assert all(a <= b + 1e-12 for a, b in pairwise(found))
    highest = 0.0
    for size, us in sorted(points):
        highest = max(highest, us)
        assert curve.at(size).log_s == pytest.approx(np.log(highest * 1e-6), abs=1e-9)


@pytest.mark.parametrize("operation", Operation)
def test_other_numbers_of_ranks_and_sizes_are_within_10_percent(operation: Operation) -> None:
    link = TIMES[operation]
    known = Collectives([sampled(operation, ranks, link, sizes=SIZES[::3]) for ranks in (2, 4, 16)])
    for ranks in (2, 3, 4, 8, 16, 32):
        for size in (65536, 200_000, 2**20, 5_000_000, 2**24, 2**26):
            assert takes(known, operation, ranks, size) == pytest.approx(ring(operation, ranks, size, link), rel=0.1)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("measured", [(2, 8), (4, 64)], ids=str)
def test_rings_of_numbers_of_ranks_between_far_ones_are_met(operation: Operation, measured: tuple[int, int]) -> None:
    """Logarithms of whole times missed four ranks between two and eight by 12 %, whether bytes or latency counted."""
    link = TIMES[operation]
    known = Collectives([sampled(operation, ranks, link) for ranks in measured])
    for ranks in range(measured[0], measured[1] + 1):
        for size in (1024, 2**20, 2**26):
            assert takes(known, operation, ranks, size) == pytest.approx(ring(operation, ranks, size, link), rel=0.02)


def test_what_takes_as_long_for_all_ranks_is_nearly_that_between() -> None:
    """As where switches sum, whose steps are few: the ring's rule is not forced on what was measured."""
    flat = dict.fromkeys(SIZES, 20.0)
    known = Collectives(
        CollectiveTimes(operation=Operation.all_reduce, ranks=ranks, us_by_bytes=flat) for ranks in (2, 8)
    )
    assert takes(known, Operation.all_reduce, 4, 2**20) == pytest.approx(20e-6, rel=0.15)


def test_a_measured_point_is_met_exactly_whoever_shares_the_link() -> None:
    """Of 4 groups that shared a node's link, one alone would take less, but for what no bytes take."""
    times = CollectiveTimes(
        operation=Operation.all_reduce, ranks=4, nodes=4, sharing=4, us_by_bytes={2**20: 1000.0, 2**24: 16000.0}
    )
    known = Collectives([times])
    assert takes(known, Operation.all_reduce, 4, 2**22, between=True) == pytest.approx(4000e-6 / 4)
    assert known.link(Exchange(Operation.all_reduce, 4, 2**22), gpus=8, between=False) is None
    assert known.link(Exchange(Operation.all_gather, 4, 2**22), gpus=8, between=True) is None


def test_of_two_groups_of_as_many_ranks_that_with_as_many_on_a_node_counts() -> None:
    on_two, on_sixteen = Link(latency_s=1e-5, s_per_byte=1e-11), Link(latency_s=1e-4, s_per_byte=1e-10)
    known = Collectives(
        [sampled(Operation.all_reduce, 16, on_two, 2), sampled(Operation.all_reduce, 16, on_sixteen, 16)]
    )
    for stride, link in ((1, on_two), (8, on_sixteen)):
        found = known.link(Exchange(Operation.all_reduce, 16, 2**20, stride), gpus=8, between=True)
        assert found is not None
        assert found.s_per_byte == pytest.approx(link.s_per_byte, rel=0.1)


def test_rings_of_a_gpu_on_each_node_are_not_taken_for_rings_of_all_gpus() -> None:
    """Nodes of eight GPUs with a card each: of 2 and 4 nodes both were measured. 16 ranks on as many nodes were taken
    for the 16 of two nodes, which have eight cards, and took a sixth of their time."""
    operation = Operation.all_reduce
    card, cards = Link(latency_s=2e-5, s_per_byte=8e-11), Link(latency_s=2e-5, s_per_byte=1e-11)
    known = Collectives(
        sampled(operation, each * nodes, link, nodes) for each, link in ((1, card), (8, cards)) for nodes in (2, 4)
    )
    for ranks, stride, expected in ((8, 8, card), (16, 8, card), (64, 1, cards)):
        link = known.link(Exchange(operation, ranks, 2**26, stride), gpus=8, between=True)
        assert link is not None
        assert ring(operation, ranks, 2**26, link) == pytest.approx(ring(operation, ranks, 2**26, expected), rel=0.02)


def test_of_measurements_as_far_off_those_with_fewer_ranks_on_a_node_count() -> None:
    """Rings of two GPUs on each node, between those of one and of four: 8 ranks took a fourth of what 4 and 16 took."""
    operation = Operation.all_reduce
    card, cards = Link(latency_s=2e-5, s_per_byte=8e-11), Link(latency_s=2e-5, s_per_byte=2e-11)
    known = Collectives(
        sampled(operation, ranks, link, nodes)
        for ranks, nodes, link in ((2, 2, card), (16, 16, card), (8, 2, cards), (16, 4, cards))
    )
    for ranks in (4, 8, 16):
        link = known.link(Exchange(operation, ranks, 2**26, 4), gpus=8, between=True)
        assert link is not None
        assert ring(operation, ranks, 2**26, link) == pytest.approx(ring(operation, ranks, 2**26, card), rel=0.02)


def measured(kind: NodeKind, times: list[CollectiveTimes]) -> NodeKind:
    assert kind.profile is not None
    return replace(kind, profile=replace(kind.profile, collectives=times))


def of_formulas(kind: NodeKind, factor: float = 1.0) -> NodeKind:
    """With collectives of every number of ranks that take `factor` times what the formulas say."""
    group = kind.group
    links = [
        Link(latency_s=factor * us * 1e-6, s_per_byte=factor * 8e-9 / rate)
        for us, rate in (
            (group.intra_latency_us, group.intra_gbit_per_s),
            (group.inter_latency_us, group.inter_gbit_per_s),
        )
    ]
    return measured(
        kind,
        [
            sampled(operation, ranks, links[between], ranks if between else 1)
            for operation in Operation
            for ranks in (2, 4, 8, 32)
            for between in (0, 1)
        ],
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline": 4, "data": 4, "tensor": 2},
        {"pipeline": 2, "data": 16, "tensor": 1, "sharded_optimizer": True},
        {"pipeline": 1, "data": 16, "tensor": 2, "sharded_optimizer": True, "zero": 3},
        {"pipeline": 2, "data": 8, "tensor": 2, "hierarchical_reduce": True},
    ],
    ids=str,
)
def test_what_takes_as_long_as_the_formulas_say_changes_nothing(sizes: dict[str, int]) -> None:
    """Within 3 %, and twice as long takes twice as long."""
    one = experiment("parallel.global_batch_size=64")
    plain = kinds(one)
    training = Training.of(one)
    training = replace(training, parallel=replace(training.parallel, **sizes))  # type: ignore[arg-type]
    orders = np.zeros((1, 8), int)
    own, same, twice = (
        pipelines(training, some, orders)
        for some in (plain, [of_formulas(kind) for kind in plain], [of_formulas(kind, 2) for kind in plain])
    )
    layers = column(*[48 // training.parallel.pipeline] * training.parallel.pipeline)
    for of in (lambda one: one.hop, lambda one: one.embedding, lambda one: one.sums.of(layers)):
        assert of(same) == pytest.approx(of(own), rel=0.03)
        assert of(twice) == pytest.approx(2 * of(own), rel=0.03)
    assert same.optimizer.of(layers) == pytest.approx(own.optimizer.of(layers), rel=0.03)


def test_a_profile_without_collectives_predicts_to_the_bit_what_it_did() -> None:
    """And one whose collectives are slower predicts more."""
    placed = planned(experiment())
    empty = replace(placed, nodes=[measured(node, []) for node in placed.nodes])
    assert predict_plan(empty).iteration_s == predict_plan(placed).iteration_s
    slower = replace(placed, nodes=[of_formulas(node, 3) for node in placed.nodes])
    assert predict_plan(slower).iteration_s > predict_plan(placed).iteration_s


def test_what_is_hard_to_believe_of_collectives_is_said_with_the_figures() -> None:
    one = experiment()
    (kind,) = kinds(one)
    fast = sampled(Operation.all_reduce, 8, Link(latency_s=1e-5, s_per_byte=8e-9 / 4000), 8)
    falling = CollectiveTimes(operation=Operation.all_gather, ranks=2, us_by_bytes={1024: 90.0, 4096: 30.0})
    assert kind.profile is not None
    before = [*doubts(Training.of(one), [kind], ())]
    added = {*doubts(Training.of(one), [measured(kind, [fast, falling])], ())} - {*before}
    assert len(added) == 2
    text = " ".join(added)
    assert "4096 bytes take 30 us, less than 1024 bytes (90 us)" in text
    assert "3.48e+03 Gbit/s, but cluster.groups.gpu2.inter_gbit_per_s=40" in text
    assert not {*doubts(Training.of(one), [of_formulas(kind)], ())} - {*before}


def test_a_doubt_about_rings_of_a_gpu_on_each_node_says_their_figures() -> None:
    """Also where as many ranks of those with all GPUs on a node were measured, which do not contradict the links."""
    one = experiment()
    (kind,) = kinds(one)
    usual, fast = (Link(latency_s=1e-5, s_per_byte=8e-9 / rate) for rate in (40, 4000))
    alone = sampled(Operation.all_reduce, 4, fast, 4)
    together = sampled(Operation.all_reduce, 4 * kind.gpus, usual, 4)
    before = {*doubts(Training.of(one), [kind], ())}
    (doubt,) = {*doubts(Training.of(one), [measured(kind, [alone, together])], ())} - before
    assert alone.name in doubt and "Gbit/s, but cluster.groups.gpu2.inter_gbit_per_s=40" in doubt


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"ranks": 1}, "ranks must be at least 2"),
        ({"nodes": 9}, "nodes from 1 to ranks"),
        ({"us_by_bytes": {1024: 3.0}}, "at least two sizes"),
        ({"us_by_bytes": {1024: 3.0, 2048: 0.0}}, "2048: 0.0 must be above 0"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_collectives_are_refused(change: dict[str, object], rule: str) -> None:
    values = {"operation": Operation.all_reduce, "ranks": 4, "us_by_bytes": {1024: 3.0, 4096: 4.0}}
    with pytest.raises(ConfigError, match=rule):
        LayerProfile(gpu="A10", source="here", collectives=[CollectiveTimes(**{**values, **change})])  # type: ignore[arg-type]
    one = CollectiveTimes(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="occurs twice"):
        LayerProfile(gpu="A10", source="here", collectives=[one, one])
    assert not profile_doubts(LayerProfile(gpu="A10", source="here", collectives=[one]))
