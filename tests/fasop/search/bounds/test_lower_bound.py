"""Bounds of sizes, over the options that a search tries with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import conf
from conf.schema.experiment import Gpu, Schedule
from fasop.costs.arrays import Floats
from fasop.costs.hardware import Factors, NodeKind
from fasop.costs.layers import LayerTimes, layer_times
from fasop.search.arguments import Arguments
from fasop.search.bounds.gpu_classes import Way
from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.inputs import read, scattering
from fasop.search.order_search import Bounded, search_partitions
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from fasop.search.search import Best, SpaceSearch, explore
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.choices import Choices
from fasop.simulation import nodes
from megatron_ext.contract.parallel_config import Offload
from tests.support.cases import fewer
from tests.support.fasop.plans import MEGATRON, pipelines
from tests.support.fasop.random_clusters import (
    best_times,
    random_case,
    with_collectives,
    with_links,
    with_nics,
    with_uplinks,
)
from tests.support.fasop.random_pipelines import all_partitions
from tests.support.fasop.searches import bounds, floor
from tests.support.fasop.seeds import seeds

SLOW_LINKS = ("cluster=a10x8", "cluster.groups.gpu2.gpus_per_node=1", "model=small", "parallel.global_batch_size=8")


@pytest.mark.parametrize("engine", [(), MEGATRON], ids=["tdpp", "megatron_lm"])
@pytest.mark.parametrize("sharded", [(False,), (True,), (False, True)], ids=str)
def test_no_plan_beats_the_bound_where_replicas_mostly_sum_gradients(
    sharded: tuple[bool, ...], engine: tuple[str, ...]
) -> None:
    """A sharded optimizer sums in half the time, and takes some for handing out its weights."""
    inputs = read([*SLOW_LINKS, "train.precision=fp16", *engine])
    fixed = Choices(tensor=(1,), data=(8,), pipeline=(1,), micro_batch_size=(1,), schedule=(Schedule.one_f_one_b,))
    space = Space(inputs.training, inputs.kinds, replace(fixed, sharded_optimizer=sharded))
    keep = Best(1)
    seen = explore([space], keep)
    (plan,) = keep.plans
    assert plan.parallel.sharded_optimizer == sharded[-1]
    assert 0.7 * plan.total < bounds(space).min() <= plan.total * (1 + 1e-9)
    assert seen.least <= plan.total * (1 + 1e-9)


def test_no_plan_beats_the_bound_of_its_work_and_its_updates() -> None:
    """Updates take most of an iteration where what they need comes from the host's memory."""
    near = tried = 0
    for seed in seeds(fewer(12, 60)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng, alike=seed % 2 == 0)
        parallel = replace(training.parallel, offload=Offload.optimizer)
        rates = float(rng.choice([1e-3, 1e-2, 1e-1])) * rng.uniform(1, 1.5, len(kinds))
        slow = [replace(kind.gpu, host_gb_per_s=float(rate)) for kind, rate in zip(kinds, rates, strict=True)]
        kinds = [replace(kind, gpu=gpu) for kind, gpu in zip(kinds, slow, strict=True)]
        found = [*(best_times(replace(training, parallel=parallel), kinds, choices) or ())]
        each = LowerBounds(kinds).of_each_work([sized for sized, _ in found], choices.recompute, kinds)
        for (sized, seconds), of_each in zip(found, each, strict=True):
            bound = LowerBounds(kinds).of_work([sized], choices.recompute, kinds)
            assert of_each == pytest.approx(bound)
            assert bound <= seconds * (1 + 1e-9)
            tried += np.isfinite(seconds)
            near += bound > 0.15 * seconds
    assert tried > 50 and near > 5


def test_bounds_hold_for_tensor_groups_that_share_sequences_and_for_those_that_do_not() -> None:
    """Those that do send shorter messages between stages, whichever way is named first."""
    words = [word for word in SLOW_LINKS if "gpus_per_node" not in word]
    words += ["cluster.groups.gpu2.gpus_per_node=2", "cluster.groups.gpu2.count=2"]
    words += ["cluster.groups.gpu2.inter_gbit_per_s=0.1", "parallel.tensor=2", "parallel.pipeline=2"]

    def found(given: str) -> tuple[Plan, float]:
        inputs = read([*words, f"parallel.sequence_parallel={given}"])
        space, keep = Space(inputs.training, inputs.kinds, inputs.choices), Best(1)
        explore([space], keep)
        return keep.plans[0], float(bounds(Space(inputs.training, inputs.kinds, inputs.choices)).min())

    plan, _ = found("true")
    for given in ("false,true", "true,false"):
        best, least = found(given)
        assert best.parallel.sequence_parallel
        assert best.total == plan.total
        assert least <= plan.total * (1 + 1e-9)
    assert found("false")[1] > plan.total
    one = plan.training
    whole = replace(one, parallel=replace(one.parallel, sequence_parallel=False))
    known, kinds = LowerBounds(plan.kinds), plan.kinds
    together = [float(known.of([some], Way.of(one.parallel), kinds)[0]) for some in (whole, one)]
    assert together == [floor(whole, kinds), floor(one, kinds)]


def known_and_found(space: Space, known: Floats) -> Iterator[tuple[float, float]]:
    """What is `known` of each number of a space, and the seconds of the best plan of it that is found."""
    for number, bound in enumerate(known.tolist()):
        for group in space.built(number, space.first):
            one = Bounded.of(group, worth=lambda seconds: seconds < np.inf)
            _, seconds = search_partitions(one, worth=lambda seconds: seconds < np.inf)
            yield bound, float(seconds.min())


def test_no_plan_beats_what_its_space_knows_where_replicas_offload_less_than_one_alone() -> None:
    """In fp32 and with ZeRO 3 replicas step the weights that they have, of which one alone keeps a copy."""
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.gpus.a10.host_gb_per_s=2", "model=small"]
    words += ["model.sequence_length=128", "parallel.global_batch_size=4", "train.precision=fp32", "parallel.zero=3"]
    words += ["parallel.offload=optimizer", "parallel.schedule=one_f_one_b", "parallel.recompute=none"]
    inputs, tried = read(words), 0
    space = Space(inputs.training, inputs.kinds, inputs.choices)
    for bound, seconds in known_and_found(space, space.known):
        assert bound <= seconds * (1 + 1e-9)
        tried += 1
    assert tried > 10


@pytest.mark.slow
@pytest.mark.parametrize("changed", [None, with_links, with_uplinks, with_nics, with_collectives])
def test_no_plan_beats_the_bound_where_nodes_wait_for_slow_links(
    changed: Callable[[np.random.Generator, Sequence[NodeKind]], list[NodeKind]] | None,
) -> None:
    """Nodes have unlike numbers of GPUs, too, or stages lie on parts of nodes."""
    tight, tried = 0, 0
    for seed in seeds(fewer(15, 80)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng)
        slow = [kind.group.inter_gbit_per_s * float(rng.choice([0.002, 0.02, 0.2])) for kind in kinds]
        kinds = [
            replace(kind, group=replace(kind.group, inter_gbit_per_s=rate))
            for kind, rate in zip(kinds, slow, strict=True)
        ]
        if changed is not None:
            kinds = changed(rng, kinds)
        for sized, seconds in best_times(training, kinds, choices) or ():
            bound = floor(sized, kinds)
            assert bound <= seconds * (1 + 1e-9)
            tried += np.isfinite(seconds)
            tight += bound > seconds / 2
    assert tried > 100
    assert tight > tried / 2


def test_no_plan_beats_the_bound_where_stages_share_nodes_of_several_kinds() -> None:
    """Three replicas of two stages, on three nodes of two GPUs: where the node that both stages share has the quick
    link, each slow one is a stage's own."""
    training, kinds, choices = random_case(np.random.default_rng(526))
    assert [(kind.gpus, kind.group.count) for kind in kinds] == [(2, 1), (2, 2)]
    kinds = [
        replace(kind, group=replace(kind.group, inter_gbit_per_s=rate))
        for kind, rate in zip(kinds, (14.5, 3.7), strict=True)
    ]
    tried = 0
    for sized, seconds in best_times(training, kinds, replace(choices, schedule=(Schedule.one_f_one_b,))) or ():
        assert floor(sized, kinds) <= seconds * (1 + 1e-9)
        tried += sized.parallel.data == 3 and np.isfinite(seconds)
    assert tried > 2


@pytest.mark.parametrize("counts", [(4, 1), (3, 3), (1, 5)], ids=str)
def test_the_embedding_is_summed_as_slowly_as_where_too_few_nodes_have_quick_links(counts: tuple[int, int]) -> None:
    """Where stages lie on parts of nodes, both ends need nodes as a whole, whose GPUs all share their link, and parts
    of others."""
    groups = [f"cluster.groups.{name}.count={count}" for name, count in zip(("a100", "a10"), counts, strict=True)]
    inputs = read(["cluster=a100x8_a10x8", "model=small", "parallel.global_batch_size=60", *groups])
    orders = np.array(sorted({*permutations(np.repeat([0, 1], counts).tolist())}))
    tried = 0
    for one in sizes(inputs.training, inputs.kinds, inputs.choices):
        width = one.parallel.tensor_size * one.parallel.data
        if one.parallel.micro_batch_size > 1 or 8 % width == 0 or width % 8 == 0:
            continue
        lines = pipelines(one, inputs.kinds, orders)
        least = (lines.optimizer.fixed[0] + lines.least_exposed[0] + lines.embedding).min()
        assert 0.9 * least < LowerBounds(inputs.kinds).ending(one, inputs.kinds) <= least * (1 + 1e-9)
        tried += 1
    assert tried > 4


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
def test_no_plan_beats_the_bound_where_replicas_share_nodes(uneven: bool) -> None:
    """Three nodes of one to three kinds, whose GPUs stages and rings share, with links that are quicker either within
    nodes or between them."""
    tried = shared = 0
    for seed in seeds(fewer(40, 300)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng)
        gpus, counts = int(rng.choice([2, 4])), ((3,), (1, 2), (1, 1, 1))[len(kinds) - 1]
        rates = [
            {"intra_gbit_per_s": float(rng.choice([1.0, 10.0])), "inter_gbit_per_s": float(rng.choice([0.3, 3.0]))}
            for _ in kinds
        ]
        kinds = [
            replace(kind, gpus=gpus, group=replace(kind.group, count=count, **own))
            for kind, count, own in zip(kinds, counts, rates, strict=True)
        ]
        orders = np.array(sorted({*permutations(np.repeat(np.arange(len(kinds)), counts).tolist())}))
        for one in sizes(training, kinds, choices, uneven=uneven):
            if one.parallel.pipeline > 4:
                continue
            for schedule, chunks in choices.ways:
                if not choices.runs(one.parallel, schedule, chunks, one.model, one.engine):
                    continue
                table = all_partitions(one.blocks.layers, one.parallel.pipeline * chunks)
                for variant in choices.variants(replace(one.parallel, schedule=schedule, chunks=chunks)):
                    plan = replace(one, parallel=variant)
                    lines = pipelines(plan, kinds, orders).take(np.repeat(np.arange(len(orders)), table.shape[1]))
                    columns = np.tile(table, (1, len(orders)))
                    seconds = np.where(lines.fits(columns), lines.iteration(columns), np.inf).min()
                    assert floor(plan, kinds) <= seconds * (1 + 1e-9)
                    tried += 1
                    shared += len(kinds) > 1 and gpus % variant.data > 0
    assert shared > tried / 10 > 10


def test_no_plan_beats_the_bound_where_slow_gpus_have_the_quick_links() -> None:
    """Too few to be a stage: beside others, their backward passes hide what is summed over the slow links of these."""
    tried = 0
    for seed in seeds(fewer(20, 120)):
        rng = np.random.default_rng(seed)
        training, (kind, *_), choices = random_case(rng)
        kinds, rate, slower = list[NodeKind](), 10 ** rng.uniform(-1, 2), rng.uniform(1, 10, 2)
        for name, count, quick, (forward, backward) in (("a", 3, 1, (1.0, 1.0)), ("b", 1, 100, slower.tolist())):
            group = replace(kind.group, count=count, inter_gbit_per_s=quick * rate)
            factors = Factors(forward=forward, backward=backward)
            kinds.append(replace(kind, name=name, gpus=1, group=group, factors=factors))
        training = replace(
            training,
            model=replace(training.model, layers=int(rng.integers(2, 6)), hidden=1024),
            parallel=replace(training.parallel, global_batch_size=4),
        )
        choices = replace(choices, schedule=(Schedule.one_f_one_b,))
        for sized, seconds in best_times(training, kinds, choices) or ():
            assert floor(sized, kinds) <= seconds * (1 + 1e-9)
            tried += sized.parallel.data > 1 and np.isfinite(seconds)
    assert tried > 20


@pytest.mark.parametrize("changed", [None, with_links, with_collectives])
@pytest.mark.parametrize("zero", [2, 3])
def test_no_plan_beats_the_bound_where_replicas_exchange_for_every_micro_batch(
    zero: int, changed: Callable[[np.random.Generator, Sequence[NodeKind]], list[NodeKind]] | None
) -> None:
    """Links are slow, within nodes too; some GPUs are slower than others in one pass alone."""
    tight, tried = 0, 0
    for seed in seeds(fewer(12, 60)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng, alike=bool(seed % 3))
        factor, within = float(rng.choice([0.0002, 0.002, 0.2])), float(rng.choice([0.002, 0.1, 1.0]))
        kinds = [_slower(rng, kind, factor, within) for kind in kinds]
        if changed is not None:
            kinds = changed(rng, kinds)
        hierarchical = zero == 2 and rng.random() < 0.3
        parallel = replace(training.parallel, zero=zero, hierarchical_reduce=hierarchical)
        training = replace(training, parallel=parallel)
        for sized, seconds in best_times(training, kinds, replace(choices, sharded_optimizer=(True,))) or ():
            bound = float(LowerBounds(kinds).of_rounds([sized], kinds)[0])
            assert bound <= seconds * (1 + 1e-9)
            assert sized.scatters or bound == 0
            tried += sized.scatters and np.isfinite(seconds)
            tight += np.isfinite(seconds) and bound > seconds / 4
    assert tried > 30
    assert tight > 3


@pytest.mark.parametrize("zero", [2, 3])
def test_no_plan_beats_what_its_space_knows_where_replicas_exchange_for_every_micro_batch(zero: int) -> None:
    """With ZeRO replicas share the optimizer, whatever the training says whose sizes a space tries."""
    words = [*SLOW_LINKS, "cluster.groups.gpu2.count=4", "cluster.groups.gpu2.inter_gbit_per_s=1"]
    some = ["parallel.schedule=one_f_one_b", "parallel.micro_batch_size=1", "parallel.recompute=none"]
    inputs = scattering(read([*words, *some]), zero)
    space, slow = Space(inputs.training, inputs.kinds, inputs.choices), 0
    for bound, seconds in known_and_found(space, bounds(space)):
        assert bound <= seconds * (1 + 1e-9)
        slow += bound > 0.6 * seconds
    assert slow


@pytest.mark.parametrize(("forward", "backward", "known"), [(4.0, 4.0, True), (4.0, 0.25, False)])
def test_of_replicas_on_gpus_of_which_none_is_the_slower_one_in_every_pass_no_exchange_is_known(
    forward: float, backward: float, known: bool
) -> None:
    """A stage may then take each pass from another replica, which hides more of what they exchange than either does."""
    words = [*SLOW_LINKS, "cluster.groups.gpu2.count=2", "cluster.groups.gpu2.inter_gbit_per_s=1"]
    inputs = scattering(read([*words, "parallel.micro_batch_size=1"]), 2)
    (kind,) = inputs.kinds
    one = replace(kind, group=replace(kind.group, count=1))
    other = replace(one, name="other", factors=replace(one.factors, forward=forward, backward=backward))
    two = next(sized for sized in sizes(inputs.training, [one, other]) if sized.parallel.data == 2)
    assert (LowerBounds([one, other]).of_rounds([two], [one, other])[0] > 0) == known


def _slower(rng: np.random.Generator, kind: NodeKind, between: float, within: float) -> NodeKind:
    rates = {
        "inter_gbit_per_s": kind.group.inter_gbit_per_s * between,
        "intra_gbit_per_s": kind.group.intra_gbit_per_s * within,
    }
    forward, backward = rng.choice([0.5, 1.0, 4.0], 2)
    factors = replace(kind.factors, forward=float(forward), backward=float(backward))
    return replace(kind, group=replace(kind.group, **rates), factors=factors)


@pytest.mark.slow
def test_the_best_group_of_a_cluster_is_found_among_quick_gpus_behind_slow_links() -> None:
    """Eight A10 in a node beside four nodes of an H100 each, at 1 Gbit/s."""
    inputs = read(["cluster=p100x2", "model=small", "parallel.global_batch_size=32", "train.precision=fp16"])
    (old,) = inputs.kinds
    kinds = [
        _nodes(old, "singles", _gpu("h100_80gb"), count=4, gpus=1, rate=1.0),
        _nodes(old, "fours", old.gpu, count=2, gpus=4, rate=100.0),
        _nodes(old, "eight", _gpu("a10"), count=1, gpus=8, rate=25.0),
    ]

    def best(kinds: list[NodeKind]) -> float:
        return best_plans(replace(inputs, kinds=kinds), Arguments()).plans[0].total

    assert best(kinds) <= min(best([kind]) for kind in kinds) * (1 + 1e-9)


def _gpu(name: str) -> Gpu:
    return Gpu(**yaml.safe_load((Path(conf.__file__).parent / f"gpu/{name}.yaml").read_text()) | {"profile": None})


def _nodes(kind: NodeKind, name: str, gpu: Gpu, count: int, gpus: int, rate: float) -> NodeKind:
    group = replace(kind.group, count=count, gpus_per_node=gpus, inter_gbit_per_s=rate)
    return replace(kind, name=name, gpu=gpu, gpus=gpus, group=group)


class Below:
    """Wants the plans that take no longer than so many seconds, and keeps none."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def worth(self, kinds: Sequence[NodeKind], bounds: Floats) -> NDArray[np.bool_]:
        return np.asarray(bounds <= self._limit)

    def within_reach(self, kinds: Sequence[NodeKind], seconds: float) -> bool:
        return True

    def add(self, plans: Sequence[Plan]) -> None:
        pass


def test_what_is_proved_of_sizes_counts_the_options_that_were_not_worth_building() -> None:
    left_out = 0
    for seed in seeds(fewer(4, 20)):
        case = random_case(np.random.default_rng(seed))
        space = Space(*case)
        for number in range(len(space)):
            bounds = sorted(space.bounds(number, space.options(number), lambda seconds: seconds < np.inf).tolist())
            if len(bounds) > 1 and bounds[-1] > 1.0001 * bounds[0]:
                looked = Space(*case)
                SpaceSearch(looked, Below((bounds[0] + bounds[-1]) / 2), np.inf).look()
                assert looked.known[number] <= bounds[-1]
                left_out += 1
    assert left_out


@pytest.mark.slow
def test_the_best_plan_is_found_where_some_layers_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all GPUs or on some, or forward alone: bounds were nan, and no plan was found."""
    none: dict[str, Sequence[tuple[float, float]]] = {}

    def measured(gpu: Gpu, *rest: Any) -> LayerTimes:
        found = layer_times(gpu, *rest)
        layers = (
            replace(one, forward=forward * one.forward, backward=backward * one.backward)
            for one, (forward, backward) in zip(found.layers, itertools.cycle(none[gpu.name]), strict=False)
        )
        return replace(found, layers=tuple(layers))

    monkeypatch.setattr(nodes, "layer_times", measured)
    tried = 0
    for seed in seeds(fewer(10, 40)):
        rng = np.random.default_rng(seed)
        training, kinds, choices = random_case(rng, alike=False)
        some = [((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))[number] for number in rng.integers(0, 3, 5)]
        for kind in kinds:
            none[kind.gpu.name] = some if seed % 2 else [some[number] for number in rng.permutation(5)]
        found = best_times(training, kinds, choices)
        if not found or not np.isfinite(least := min(seconds for _, seconds in found)):
            continue
        keep = Best(1)
        seen = explore([Space(training, kinds, choices)], keep)
        assert keep.plans[0].total == pytest.approx(least)
        assert seen.least <= least * (1 + 1e-9)
        assert all(floor(sized, kinds) <= seconds * (1 + 1e-9) for sized, seconds in found)
        tried += 1
    assert tried > 2
