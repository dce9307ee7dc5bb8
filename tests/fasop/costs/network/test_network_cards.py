"""Nodes with several network cards: a message goes through one of them, sums through those of a ring's GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import ConfigError
from fasop.costs.hardware import NodeKind, node_kinds
from fasop.costs.network.collectives import Exchange
from fasop.costs.profiles.profile import LayerProfile
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from fasop.costs.training import Training
from fasop.simulation.pipelines import Pipelines
from tests.support.fasop.plans import kinds, mixed, pipelines
from tests.support.fasop.random_clusters import with_links, with_nics
from tests.support.fasop.searches import against_brute_force

GBIT_PER_S, LATENCY_S, BYTES = 40.0, 20e-6, 1024 * 1600 * 4
"""Out of a node, and GPT-2 XL's activations in fp32."""


def nodes_of(nics: int, count: int = 4) -> NodeKind:
    """Nodes of four A10."""
    a10 = kinds(mixed())[1]
    return replace(a10, group=replace(a10.group, count=count, inter_gbit_per_s=GBIT_PER_S, nics=nics))


def placed(nics: int, tensor: int, data: int, **options: bool) -> Pipelines:
    """On four nodes."""
    whole = Training.of(mixed())
    sizes = {"tensor": tensor, "data": data, "pipeline": 16 // tensor // data, "global_batch_size": 16, **options}
    parallel = replace(whole.parallel, **sizes)  # type: ignore[arg-type]
    return pipelines(replace(whole, parallel=parallel), [nodes_of(nics)], np.zeros((1, 4), np.int64))


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
def test_a_message_out_of_a_node_goes_through_one_card(nics: int, tensor: int, data: int) -> None:
    """So many ranks of a node send at the same time, spread over the cards, as a stage has."""
    width = tensor * data
    lines = placed(nics, tensor, data)
    on_each_card = max(width // nics, 1)
    last_on_node = 4 // width - 1
    seconds = LATENCY_S + BYTES * 8e-9 * on_each_card / (GBIT_PER_S / nics)
    assert lines.hop[last_on_node, 0] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize(
    ("tensor", "data", "slower"),
    [
        (1, 16, 1),  # one ring, of four GPUs in each node
        (4, 4, 1),  # four rings, each through a card of its own
        (1, 4, 1),  # a node for each stage: nothing leaves it
        (2, 8, 1),
    ],
)
def test_sums_that_use_all_cards_take_as_long_as_with_one(tensor: int, data: int, slower: int, by_node: bool) -> None:
    one, four = (placed(nics, tensor, data, hierarchical_reduce=by_node).sums.layer[:, 0] for nics in (1, 4))
    assert four == pytest.approx(slower * one)


def test_a_ring_of_one_gpu_a_node_has_one_card() -> None:
    """Stages of one GPU in each of two nodes: a ring has a quarter of a node's cards, but four stages' rings go at
    once."""
    kind = nodes_of(4, 2)
    exchange = Exchange(Operation.all_reduce, 2, 1e6, 4)
    assert kind.alone(exchange) == 4
    assert kind.alone(exchange._replace(stride=1)) == 2
    assert kind.alone(Exchange(Operation.send_recv, 2, 1e6)) == 4
    assert kind.alone(exchange._replace(ranks=16, stride=1)) == 1


def test_what_was_measured_through_one_card_is_not_slower_while_others_use_theirs() -> None:
    """A message that one rank sent alone took 1 ms: so it does while all four of a node's GPUs send; with one card they
    take four times as long."""
    times = CollectiveTimes(operation=Operation.send_recv, ranks=2, nodes=2, us_by_bytes={1: 10.0, BYTES: 1000.0})
    measured = LayerProfile(gpu="A10", source="drawn", collectives=[times])
    exchange = Exchange(Operation.send_recv, 2, float(BYTES))
    for nics, sharing in ((1, 4), (4, 1)):
        kind = replace(nodes_of(nics), profile=measured)
        link = kind.between(exchange)
        for ranks, expected in ((1, 1), (4, sharing)):
            taken = link.latency_s + BYTES * link.s_per_byte * max(ranks, kind.alone(exchange))
            assert taken == pytest.approx(expected * 1e-3, rel=0.02)


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_a_ring_has_the_cards_of_its_own_gpus_however_many_were_measured(nics: int, each: int) -> None:
    """A ring of one GPU on each node was four times too fast by what rings of all four took with a card each."""
    plain, sizes = nodes_of(nics), [2**power for power in range(10, 31, 2)]

    def seconds(kind: NodeKind, exchange: Exchange, rings: int = 1) -> float:
        steps, share = exchange.steps
        link = kind.between(exchange)
        return steps * (link.latency_s + share * exchange.bytes * link.s_per_byte * max(rings, kind.alone(exchange)))

    ring = Exchange(Operation.all_reduce, 4 * each, 1.0, 4 // each)
    us_by_bytes = {size: 1e6 * seconds(plain, ring._replace(bytes=size)) for size in sizes}
    times = CollectiveTimes(operation=ring.operation, ranks=ring.ranks, nodes=4, us_by_bytes=us_by_bytes)
    known = replace(plain, profile=LayerProfile(gpu="A10", source="drawn", collectives=[times]))
    for asked in (1, 2, 4):
        exchange = Exchange(ring.operation, 4 * asked, 2.0**26, 4 // asked)
        for rings in (1, 4 // asked):
            assert seconds(known, exchange, rings) == pytest.approx(seconds(plain, exchange, rings), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("links", [False, True])
def test_the_best_plan_is_that_of_brute_force_with_several_cards(links: bool) -> None:
    def changed(rng: np.random.Generator, some: list[NodeKind]) -> list[NodeKind]:
        return with_nics(rng, with_links(rng, some) if links else some)

    assert sum(one.total != plain.total for one, plain in against_brute_force(25, 40, changed)) > 2


def test_more_cards_than_gpus_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.groups\.gpu2\.nics=5 for gpus_per_node=4: a GPU sends through one"
    ):
        node_kinds(compose(["cluster=a10x8", "cluster.groups.gpu2.nics=5"]).cluster)
