"""Profiles that would mislead a search: each defect is told with its figure, and no good profile is doubted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from conf.schema.experiment import Precision
from fasop.costs.hardware import NodeKind
from fasop.costs.network.link_doubts import link_doubts
from fasop.costs.profiles.doubts import doubts
from fasop.costs.profiles.profile import Cost, LayerProfile, Links, LinkTimes, ModelCosts
from fasop.costs.profiles.steps import CollectiveTimes, Operation
from fasop.costs.training import Training
from tests.support.fasop.plans import experiment, kinds

ONE = experiment("train.precision=fp16")
Part = Callable[[int, int, str, float, float], tuple[float, float]]
"""From tensor size, micro-batch, kind of part and milliseconds of both passes to those that a profile has."""


def same(_tensor: int, _batch: int, _kind: str, forward: float, backward: float) -> tuple[float, float]:
    return forward, backward


def profiled(change: Part = same, seed: int = 0, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> NodeKind:
    """Times of GPT-2 XL on an A10 as they are, by chance a little more or less, and where a defect changes them."""
    (kind,) = kinds(ONE)
    assert kind.profile is not None
    chance = Random(seed)
    fixed, sums = chance.uniform(0, 0.4), chance.uniform(0.02, 0.15)

    def part(tensor: int, batch: int, name: str) -> Cost:
        forward, backward = {"embedding": (0.3, 0.5), "layer": (2.12, 3.4), "head": (2.1, 3.4)}[name]
        takes = fixed + (1 - fixed) * batch
        if name == "layer" and tensor > 1:
            takes = fixed + (1 - fixed) * batch / tensor + sums * batch
        times = (ms * takes * chance.uniform(0.98, 1.02) for ms in (forward, backward))
        first, second = change(tensor, batch, name, *times)
        return Cost(forward=first, backward=second)

    costs = [
        ModelCosts.of(
            {name: part(tensor, batch, name) for name in ("embedding", "layer", "head")},
            model="xl",
            tensor=tensor,
            micro_batch_size=batch,
            precision=Precision.fp16,
        )
        for tensor in (1, 2, 4)
        for batch in sizes
    ]
    return replace(kind, profile=replace(kind.profile, costs=costs))


def said(kind: NodeKind) -> list[str]:
    return [*doubts(Training.of(ONE), [kind], set())]


def times(factor: float, *names: str) -> Part:
    return lambda _t, _b, kind, *ms: tuple(one * (factor if kind in names else 1) for one in ms)  # type: ignore[return-value]


def only(tensor: int, batch: int, factor: float) -> Part:
    return lambda t, b, kind, *ms: tuple(
        one * (factor if (t, b, kind) == (tensor, batch, "layer") else 1) for one in ms
    )  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(20))
def test_good_profiles_are_not_doubted(seed: int) -> None:
    sizes = Random(seed).choice([(1,), (1, 2), (1, 2, 4, 8), (2, 8)])
    assert said(profiled(seed=seed, sizes=sizes)) == []


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        (times(1000, "embedding", "layer", "head"), r"layer\.forward=2\S+ ms is 2\S+e\+03 times what the peak rates"),
        (times(1e-3, "embedding", "layer", "head"), r"layer\.\w+=0\.0\S+ ms is 0\.00\S+ times what the peak"),
        (times(0.1, "layer"), r"layer\.\w+=\S+ ms is 0\.\d+ times what the peak rates of A10 allow"),
        (times(500, "embedding"), r"embedding\.forward=\S+ ms is \S+ times what the peak rates of A10 allow"),
        (times(80, "head"), r"head\.forward=\S+ ms is \S+ times what the peak rates of A10 allow \(.*others are"),
        (lambda t, b, kind, *ms: (2.12 * b, 3.4 * b), r"\.tensor=4 \S+=8 .*by its times without a tensor group"),
        (only(1, 1, 3.0), r"micro_batch_size=2 .*layer\.forward=\S+ ms is 0\.\d+ times that of micro-batch 1"),
        (only(1, 8, 2.0), r"micro_batch_size=8 .*layer\.forward=\S+ ms is \S+ times that of micro-batch 4"),
        (only(4, 8, 0.2), r"tensor=4 \S+=8 .*layer\.forward=\S+ ms is 0\.\d+ times that of tensor 2"),
        (lambda t, b, kind, f, back: (1.5 * back, 0.6 * f), r"layer\.backward=\S+ ms is 0\.\d+ times forward"),
    ],
    ids=[
        "microseconds", "seconds", "faster than the GPU", "slow embedding", "slow head", "no faster with tensor",
        "slower at micro-batch 1", "slower at 8", "tensor too fast", "passes swapped",
    ],
)  # fmt: skip
def test_times_that_mislead_are_told_with_their_figure(change: Part, figure: str) -> None:
    found = said(profiled(change))
    assert [one for one in found if re.search(figure, one)], found


@pytest.mark.parametrize("factor", [1000, 1e-3])
def test_an_optimizer_in_other_units_is_told(factor: float) -> None:
    kind = profiled()
    assert kind.profile is not None
    wrong = {Precision.fp16: kind.profile.optimizer_ns_per_parameter[Precision.fp16] * factor}
    (doubt,) = said(replace(kind, profile=replace(kind.profile, optimizer_ns_per_parameter=wrong)))
    assert "optimizer_ns_per_parameter.fp16" in doubt
    assert "times what the peak rates of A10 allow (0.0767 ns)" in doubt


def with_links(**values: object) -> list[str]:
    kind = profiled()
    assert kind.profile is not None
    profile: LayerProfile = replace(kind.profile, **values)  # type: ignore[arg-type]
    return said(replace(kind, profile=profile))


def test_measured_links_that_contradict_the_clusters_are_told() -> None:
    (doubt,) = with_links(between=Links(p2p=LinkTimes(latency_us=20, gbit_per_s=4000)))
    assert "has a link of 4e+03 Gbit/s, but cluster.groups.gpu2.inter_gbit_per_s=40" in doubt
    (doubt,) = with_links(within=Links(all_reduce=LinkTimes(latency_us=10, gbit_per_s=1.28, ranks=4)))
    assert "has a link of 1.28 Gbit/s, but cluster.groups.gpu2.intra_gbit_per_s=128" in doubt
    assert with_links(within=Links(p2p=LinkTimes(latency_us=10, gbit_per_s=128))) == []
    for us, count in ((0.2, 1), (130.0, 0)):  # a megabyte in milliseconds that should be microseconds
        known = CollectiveTimes(operation=Operation.all_reduce, ranks=4, us_by_bytes={2**16: us / 2, 2**20: us})
        assert len(with_links(collectives=[known])) == count


def test_gpus_of_a_node_that_are_further_from_each_other_than_from_other_nodes_are_told() -> None:
    group = profiled().group
    (doubt,) = link_doubts({"a": replace(group, intra_gbit_per_s=1.0)}, {})
    assert doubt.startswith("cluster.groups.a.intra_gbit_per_s=1, but a GPU sends to other nodes with 40 Gbit/s")
    assert not [*link_doubts({"a": replace(group, intra_gbit_per_s=12.0, nics=4)}, {})]
    assert not [*link_doubts({"a": replace(group, intra_gbit_per_s=1.0, gpus_per_node=1)}, {})]


def test_groups_that_share_a_profile_are_told_once_and_parts_of_no_model_are_left_alone() -> None:
    kind = profiled(lambda _t, _b, name, f, back: (f, 1e-9 if name == "embedding" else back))
    assert kind.profile is not None
    more = [replace(one, blocks={"extra": Cost(forward=1.0, backward=2.0)}) for one in kind.profile.costs]
    kind = replace(kind, profile=replace(kind.profile, costs=more))
    other = replace(kind, name="others")
    (doubt,) = doubts(Training.of(ONE), [kind, other], set())
    assert "embedding.backward=1e-09 ms" in doubt and "but usual is at least 0.4 (" in doubt
