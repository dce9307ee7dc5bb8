"""Which sets of nodes a search looks at, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fasop.costs.hardware import NodeKind
from fasop.costs.training import Training
from fasop.search.arguments import Arguments
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.inputs import read, scattering
from fasop.search.run import best_plans
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space, bound_options, raise_known
from fasop.search.space.node_sets import MOST as MOST_CLUSTERS
from fasop.search.space.node_sets import clusters, step
from megatron_ext.contract.parallel_config import Recompute
from tests.support.fasop.plans import MEGATRON, kinds, mixed
from tests.support.fasop.searches import A10X8, KEYS, PLAIN, bounds, search, space


def test_sets_of_nodes_have_the_sizes_and_bounds_that_each_has_by_itself() -> None:
    """Those with as many GPUs share what does not depend on their nodes."""
    inputs = read(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=2"])
    shared = LowerBounds(inputs.kinds)
    for some in clusters(inputs.kinds):
        for uneven in (False, True):
            own = Space(inputs.training, some, inputs.choices, uneven=uneven)
            one = Space(inputs.training, some, inputs.choices, shared, uneven=uneven)
            assert (len(one), one.floor) == (len(own), own.floor)
            assert len(one) == 0 or bounds(one).tolist() == bounds(own).tolist()


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
@pytest.mark.parametrize("zero", [None, 2])
def test_sets_of_nodes_that_are_bounded_together_know_what_each_knows_by_itself(zero: int | None, uneven: bool) -> None:
    """As far as it is of worth, which each has its own of."""
    inputs = read(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=2"])
    inputs = inputs if zero is None else scattering(inputs, zero)
    sets = [some for some in clusters(inputs.kinds) if len(some) == 2]
    alone = [bounds(Space(inputs.training, some, inputs.choices, uneven=uneven)) for some in sets]
    limits = [float(np.quantile(known, 0.3)) if len(known) else np.inf for known in alone]
    shared = LowerBounds(inputs.kinds)
    spaces = [Space(inputs.training, some, inputs.choices, shared, uneven=uneven) for some in sets]
    raise_known(spaces, [partial(np.greater, limit) for limit in limits])
    for one, known, limit in zip(spaces, alone, limits, strict=True):
        assert np.array_equal(one.known < limit, known < limit)
        assert np.array_equal(one.known[known < limit], known[known < limit])
        assert (one.known <= known).all()
    assert sum(map(len, spaces)) > 100


def test_options_that_are_bounded_together_have_the_bounds_that_each_has_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as they are of worth."""
    monkeypatch.setattr("fasop.search.space.candidates.FEW_LEFT", 1.0)
    inputs = read(["experiment=seed_a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=2"])
    sets, shared = [some for some in clusters(inputs.kinds) if len(some) == 2], LowerBounds(inputs.kinds)
    spaces = [Space(inputs.training, some, inputs.choices, shared) for some in sets]
    worths = [partial(np.greater, 1.5 * float(bounds(one).min()) if len(one) else np.inf) for one in spaces]
    raise_known(spaces, worths)
    bound_options(spaces, worths)
    known = {way.recompute: found for one in spaces for (way, _), found in one._of_ways.items()}
    assert {*known} == {*inputs.choices.recompute}
    of_full = 0
    for one, worth in zip(spaces, worths, strict=True):
        alone = Space(inputs.training, one.kinds, inputs.choices)
        for number in np.nonzero(worth(one.known))[0].tolist():
            together, apart = (some.bounds(number, one.options(number), worth) for some in (one, alone))
            assert np.array_equal(worth(together), worth(apart))
            assert np.array_equal(together[worth(apart)], apart[worth(apart)])
            ways = [option.parallel.recompute.way for option in one.options(number)]
            of_full += sum(worth(apart) & [way is Recompute.full for way in ways])
    assert 0 < of_full < sum(map(len, spaces))


def test_a_search_out_of_time_for_sets_of_nodes_goes_on_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it lays out once."""
    inputs = read(["experiment=seed_a100x1_a10x7", *MEGATRON, *PLAIN])
    laid_out = []

    class Noted(Space):
        def __init__(self, training: Training, kinds: Sequence[NodeKind], *more: Any, **uneven: bool) -> None:
            laid_out.append(tuple((kind.name, kind.group.count) for kind in kinds))
            super().__init__(training, kinds, *more, **uneven)

    monkeypatch.setattr("fasop.search.common_steps.Space", Noted)
    monkeypatch.setattr("fasop.search.run.SETS_S", 0.0)
    outcome = best_plans(inputs, Arguments(top=1))
    assert "It had no time" in "\n".join(outcome.summary)
    assert len(outcome.plans) == 1
    assert len(laid_out) == len(set(laid_out)) == len(clusters(inputs.kinds))


def test_nodes_whose_profile_lacks_a_tensor_size_leave_it_to_others() -> None:
    eight = [f"cluster.groups.{name}.gpus_per_node=8" for name in ("hgx", "gpu2")]
    inputs = read(["experiment=seed_a100x1_a10x7", *eight, "cluster.gpus.a100_40gb.profile=null", "parallel.tensor=8"])
    (plan,) = best_plans(inputs, Arguments(top=1)).plans
    assert plan.parallel.node_order == "hgx"


def test_nodes_that_only_slow_others_down_are_left_out() -> None:
    """An A10 node whose link is next to none; the plan without it is one that launch takes."""
    slow = ["cluster.groups.gpu2.inter_gbit_per_s=0.01", "cluster.groups.gpu2.count=2"]
    inputs = read(["experiment=seed_a100x1_a10x7", *MEGATRON, *slow, *PLAIN])
    best = Best(1)
    explore([Space(inputs.training, kinds, inputs.choices) for kinds in clusters(inputs.kinds)], best)
    whole = search(space(inputs.training, inputs.kinds, inputs.choices), 1).plans[0]
    plan = best.plans[0]
    assert plan.total < whole.total
    assert plan.parallel.node_order == "hgx"
    keys = [f"parallel.{key}={getattr(plan.parallel, key)}" for key in (*KEYS, "partition", "node_order")]
    assert mixed(*slow, *keys).ranks_per_node() == (4,)


@pytest.mark.parametrize("counts", [[1], [2, 3], [1, 1, 4]], ids=str)
def test_every_set_of_nodes_comes_once(counts: list[int]) -> None:
    (kind,) = kinds(A10X8)
    groups = [replace(kind, name=str(i), group=replace(kind.group, count=n)) for i, n in enumerate(counts)]
    sets = [tuple((k.name, k.group.count) for k in some) for some in clusters(groups)]
    assert len(sets) == len(set(sets)) == math.prod(n + 1 for n in counts) - 1
    assert sets[0] == tuple((str(i), n) for i, n in enumerate(counts))


def test_of_many_nodes_the_sets_differ_by_several() -> None:
    assert step([8, 8]) == 1
    assert math.prod(-(-256 // step([256] * 4)) + 1 for _ in range(4)) <= MOST_CLUSTERS + 1


def test_of_too_many_groups_those_sets_are_searched_that_leave_out_the_worst_or_some_of_one() -> None:
    assert step([1] * 9) == 1
    assert step([1] * 10) is None
    (kind,) = kinds(A10X8)
    groups = [
        replace(
            kind,
            name=f"g{number}",
            gpu=replace(kind.gpu, fp16_tflops=100.0 + number),
            group=replace(kind.group, count=2, price_per_hour=1.0 + number),
        )
        for number in range(12)
    ]
    sets = [{one.name: one.group.count for one in some} for some in clusters(groups)]
    assert len({tuple(some.items()) for some in sets}) == len(sets) <= MOST_CLUSTERS
    assert sets[0] == {kind.name: 2 for kind in groups}
    assert {kind.name: 2 for kind in groups[6:]} in sets
    assert {**{kind.name: 2 for kind in groups[7:]}, "g6": 1} in sets
    assert {kind.name: 2 for kind in groups[:5]} in sets
    for number, one in enumerate(groups):
        assert {kind.name: 2 for kind in groups if kind is not one} in sets
        assert {kind.name: 2 - (place == number) for place, kind in enumerate(groups)} in sets
