"""Where nothing fits otherwise, a search shares out gradients and weights, and each stage only as far as it needs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import cast

import pytest

from conf.compose import compose
from conf.schema.values.partition import Partition
from fasop.errors import SearchError
from fasop.search import front_search
from fasop.search.arguments import Arguments, First
from fasop.search.by_stage.kept import KeptReplay, relieved
from fasop.search.by_stage.tight import tight_plans
from fasop.search.common_steps import later, means_of, plans_beside
from fasop.search.front_search import front
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from fasop.search.space.candidates import Space
from fasop.simulation.predict import predict, predict_plan
from fasop.tables.plans import launch_words, launched_with
from megatron_ext.contract.parallel_config import Offload, Recompute

WORDS = ("cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "parallel.global_batch_size=8")
BF16 = ("train.precision=bf16", "parallel.recompute=full", "parallel.tensor=1", "parallel.schedule=one_f_one_b")
ONE_STAGE = (*WORDS, *BF16, "parallel.data=4", "parallel.pipeline=1", "parallel.micro_batch_size=1")
TWO_STAGES = (*WORDS, *BF16, "parallel.data=2", "parallel.pipeline=2", "parallel.micro_batch_size=1")
ARGS = Arguments(top=1, by_stage=False)


def with_memory(gib: float) -> str:
    return f"cluster.gpus.a10.memory_gib={gib}"


def test_more_is_shared_out_the_less_memory_there_is() -> None:
    memory = 22.2, 14.5, 10.0
    found = [best_plans(read([*ONE_STAGE, with_memory(gib), "parallel.offload=none"]), ARGS).plans[0] for gib in memory]
    assert [plan.parallel.zero for plan in found] == [None, 2, 3]
    for gib, plan in zip(memory, found, strict=True):
        assert plan.parallel.offload == "none"
        (words,) = launch_words([*WORDS, "train.precision=bf16", with_memory(gib)], [plan], {})
        launched = predict(compose(words))
        assert launched.iteration_s == pytest.approx(plan.total, rel=1e-9)
        assert all(stage.memory_gib <= gib for stage in launched.stages)


def test_gathered_weights_are_found_where_other_plans_fit_too() -> None:
    """On a node of eight A100 of 10 GiB they leave room for eight replicas, where others need stages."""
    nodes = ("cluster.groups.a100.count=1", "cluster.groups.a10.count=1", "cluster.gpus.a100_40gb.memory_gib=10")
    words = ("cluster=a100x8_a10x8", *nodes, "model=xl", "train.precision=fp16", "parallel.global_batch_size=8")
    found = best_plans(read(words), replace(ARGS, top=2))
    first, second = found.plans
    assert first.parallel.zero == 3 and second.parallel.zero is None
    alone = best_plans(read([*words, "parallel.zero=3"]), ARGS).plans[0]
    assert first.total == pytest.approx(alone.total, rel=1e-9) and first.total < 0.8 * second.total
    assert any("schedule and stage of ZeRO" in line for line in found.summary)
    without = best_plans(read([*words, "parallel.sharded_optimizer=true,false"]), ARGS)
    assert without.plans[0].total == second.total
    assert not any("ZeRO" in line for line in without.summary)


@pytest.mark.parametrize("given", ["elastic.enabled=true", "adapt.rule=noise adapt.upper=64", "adapt.rebalance=true"])
def test_no_plan_shares_out_gradients_where_batches_or_nodes_change(given: str) -> None:
    """No launch takes such plans (conf/schema/rules/training.py)."""
    assert read([*WORDS, "train.precision=fp16"]).may_scatter == (2, 3)
    assert read([*WORDS, "train.precision=fp16", *given.split()]).may_scatter == ()


def test_a_front_looks_at_all_shares_with_the_highest_stage_of_zero() -> None:
    for given, zero, lists in (("parallel.hierarchical_reduce=true", 2, 2), ("parallel.tensor=1", 3, 1)):
        inputs = read([*WORDS, "parallel.global_batch_size=6", given])
        means = later(means_of(inputs)[1:], inputs, inputs)
        beside = plans_beside(inputs, means, [inputs.kinds], [inputs.kinds])
        highest = [other for other in beside if other.everywhere][-1].spaces
        assert [space.uneven for spaces in highest for space in spaces] == [False, True][:lists]
        assert {one.parallel.zero for spaces in highest for space in spaces for one in space.options(0)} == {zero}


@pytest.mark.parametrize("given", ["parallel.zero=3", "parallel.zero=2 parallel.schedule=interleaved"])
def test_no_plan_has_shares_that_no_launch_takes(given: str) -> None:
    """Of seven samples four replicas, or two, cannot take equally many."""
    words = [*WORDS[:3], "parallel.global_batch_size=7", "parallel.data=2,4", "train.precision=fp16"]
    assert best_plans(read([*words, "parallel.zero=2"]), ARGS).plans[0].parallel.shares is not None
    with pytest.raises(SearchError, match=r"no plan for 4 GPUs has parallel.data=2,4|does not fit"):
        best_plans(read([*words, *given.split()]), ARGS)


@pytest.mark.parametrize("given", ["parallel.zero=1", "parallel.sharded_optimizer=true"])
def test_what_the_command_line_says_stays(given: str) -> None:
    with pytest.raises(SearchError, match="does not fit"):
        best_plans(read([*ONE_STAGE, with_memory(10.0), given, "parallel.offload=none"]), ARGS)


def kept_in_every_way(plan: Plan) -> Iterator[Plan]:
    """With each stage keeping each that the plan's does, or more on its GPU."""
    parallel = plan.training.parallel
    away = parallel.any_offload
    offloads = [one for one in Offload if Offload.together([one, away]) is away]
    zero = parallel.zero if isinstance(parallel.zero, int) else int(parallel.sharded_optimizer)
    ways = [*product(range(zero + 1) if zero > 1 else [zero], offloads)]
    for kept in product(ways, repeat=parallel.pipeline):
        zeros, kinds = tuple(zero for zero, _ in kept), tuple(one for _, one in kept)
        some = replace(parallel, sharded_optimizer=max(zeros) > 0, zero=zeros, offload=kinds)
        yield replace(plan, training=replace(plan.training, parallel=some))


@pytest.mark.parametrize("gib", [6.5, 7.0, 8.0, 9.0, 11.0])
def test_stages_keep_what_is_fastest_of_all_that_fits(gib: float) -> None:
    """Against every way that both stages can have."""
    found = best_plans(read([*TWO_STAGES, with_memory(gib)]), Arguments(top=2, by_stage=False)).plans
    whole = next(plan for plan in found if plan.training.parallel.alike)
    every = [predict_plan(plan) for plan in kept_in_every_way(whole)]
    best = min(one.iteration_s for one in every if all(stage.memory_gib <= gib for stage in one.stages))
    assert best * (1 - 1e-9) <= found[0].total <= 1.002 * best
    assert found[0].bound <= best * (1 + 1e-9) or found[0] is whole
    assert all(stage.memory_gib <= gib for stage in predict_plan(found[0]).stages)
    words = [f"{key}={value}" for key, value in launched_with(found[0], {}).items()]
    launched = predict(compose([*WORDS[:3], "train.precision=bf16", with_memory(gib), *words]))
    assert launched.iteration_s == pytest.approx(found[0].total, rel=1e-9)


@pytest.mark.parametrize(
    "words",
    [
        "cluster=a100x1_a10x7 parallel.schedule=zb_h1 parallel.recompute=full parallel.data=8",
        "cluster=a10x8 parallel.schedule=gpipe parallel.offload=both parallel.tensor=2 parallel.data=4",
        "cluster=two_rooms parallel.schedule=one_f_one_b parallel.recompute=full:5 parallel.data=4",
    ],
)
def test_what_each_stage_keeps_is_replayed_as_it_is_predicted(words: str) -> None:
    given = [*words.split(), "parallel.zero=3", "parallel.micro_batch_size=1", "model=xl", "train.precision=bf16"]
    given += ["parallel.global_batch_size=16"]
    plan = best_plans(read(given), Arguments(top=1, by_stage=False, leave_out=False)).plans[0]
    whole = replace(plan, training=replace(plan.training, parallel=replace(plan.training.parallel, zero=3)))
    replay, again = KeptReplay(whole), whole.training.parallel.recompute
    drawn = random.Random(1).sample([*kept_in_every_way(whole)], 12)
    for one in drawn:
        parallel = one.training.parallel
        assert isinstance(parallel.zero, tuple) and isinstance(parallel.offload, tuple)
        kept = tuple((zero, away, again) for zero, away in zip(parallel.zero, parallel.offload, strict=True))
        assert replay.seconds(kept) == pytest.approx(predict_plan(one).iteration_s, rel=1e-9)
    assert len({predict_plan(one).iteration_s for one in drawn}) > 3


def test_stages_keep_unlike_things_where_that_is_faster() -> None:
    found = best_plans(read([*TWO_STAGES, with_memory(6.5), "parallel.recompute=none,full"]), ARGS)
    assert not found.plans[0].training.parallel.alike
    assert any("gains" in line and "the same in all stages" in line for line in found.summary)


def test_no_plan_is_slower_for_more_memory() -> None:
    """A stage that had just room enough kept its optimizer's state, and had none for another layer: 0.6 % slower."""
    clusters = ("cluster=a100x1_a10x7", "cluster.groups.gpu2.count=1", "model=xl", "train.precision=bf16")
    alone = ("parallel.global_batch_size=64", "parallel.tensor=1", "parallel.pipeline=8", "parallel.schedule=zb_h1")
    seconds = [best_plans(read([*clusters, *alone, with_memory(gib)]), ARGS).plans[0].total for gib in (4.5, 5.0, 6.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


EIGHT = (
    *("cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "model.layers=8", "model.sequence_length=2048"),
    *("train.precision=bf16", "parallel.global_batch_size=16"),
    *("parallel.tensor=1", "parallel.data=1", "parallel.pipeline=4"),
    *("parallel.micro_batch_size=1", "parallel.schedule=one_f_one_b", "parallel.offload=none"),
)


def test_stages_compute_the_fewest_layers_again_that_their_memory_needs() -> None:
    """Against every number of layers that each stage can have."""
    gib = 3.4
    found = best_plans(read([*EIGHT, with_memory(gib), "parallel.recompute=none,full"]), ARGS).plans[0]
    assert len(found.training.parallel.recompute.stages) == 4
    layers = max(found.partition.layers)
    every = [Recompute.none, *(Recompute(f"full:{number}") for number in range(1, layers + 1))]
    predicted = []
    for stages in product(every, repeat=4):
        parallel = replace(found.training.parallel, recompute=Recompute("-".join(stages)))
        predicted.append(predict_plan(replace(found, training=replace(found.training, parallel=parallel))))
    fitting = [one.iteration_s for one in predicted if all(stage.memory_gib <= gib for stage in one.stages)]
    assert found.total == pytest.approx(min(fitting), rel=1e-9)
    assert found.bound <= found.total
    words = [f"{key}={value}" for key, value in launched_with(found, {}).items()]
    launched = predict(compose([*EIGHT[:7], with_memory(gib), *words]))
    assert launched.iteration_s == pytest.approx(found.total, rel=1e-9)
    assert all(stage.memory_gib <= gib for stage in launched.stages)


TWO_V100 = (
    *("cluster=v100x2", "cluster.groups.v100.count=1", "model=xl", "model.layers=12", "train.precision=fp16"),
    *("parallel.tensor=1", "parallel.data=1", "parallel.pipeline=2", "parallel.micro_batch_size=1"),
    *("parallel.global_batch_size=16", "parallel.offload=none", "parallel.recompute=none,full"),
)


@pytest.mark.parametrize(("schedule", "gib"), [("one_f_one_b", 6.0), ("gpipe", 9.0), ("gpipe", 11.0)])
def test_layers_move_to_where_fewest_are_computed_again(schedule: str, gib: float) -> None:
    """Against all layers per stage and all numbers of them, of which as few are best as fit. The bound is near."""
    words = [*TWO_V100, f"parallel.schedule={schedule}", f"cluster.gpus.v100.memory_gib={gib}"]
    found = best_plans(read(words), ARGS).plans[0]
    layers = found.training.blocks.layers
    ways = [Recompute.none, *(Recompute(f"full:{number}") for number in range(1, layers)), Recompute.full]
    every = [with_fewest(found, Partition((first, layers - first)), ways, gib) for first in range(layers + 1)]
    taken = [predict_plan(plan).iteration_s for plan in every if plan is not None]
    assert found.total == pytest.approx(min(taken), rel=1e-9)
    assert 0.99 * found.total < found.bound <= min(taken) * (1 + 1e-9)


def with_fewest(plan: Plan, partition: Partition, ways: list[Recompute], gib: float) -> Plan | None:
    """With such layers on two stages, each with the first way that fits; None if there is none for one of them."""

    def with_ways(*stages: Recompute) -> Plan:
        parallel = replace(plan.training.parallel, partition=partition.layers, recompute=Recompute("-".join(stages)))
        return replace(plan, training=replace(plan.training, parallel=parallel), partition=partition)

    held = [[stage.memory_gib for stage in predict_plan(with_ways(way, way)).stages] for way in ways]
    fitting = [[way for way, of_way in zip(ways, held, strict=True) if of_way[stage] <= gib] for stage in range(2)]
    return with_ways(fitting[0][0], fitting[1][0]) if all(fitting) else None


def test_how_much_is_computed_again_stays_as_it_is_said() -> None:
    found = best_plans(read([*EIGHT, with_memory(3.8), "parallel.recompute=full"]), ARGS).plans[0]
    assert found.training.parallel.recompute is Recompute.full
    with pytest.raises(SearchError, match="recompute=full-none must be one for all stages"):
        read([*EIGHT, "parallel.recompute=full-none"])


def test_several_numbers_of_layers_that_are_computed_again_take_what_each_takes_alone() -> None:
    """Their times are worked out side by side."""
    words = [*EIGHT, with_memory(3.8)]
    numbers = ("full:1", "full:2", "full")
    alone = {
        number: best_plans(read([*words, f"parallel.recompute={number}"]), ARGS).plans[0].total for number in numbers
    }
    found = best_plans(read([*words, f"parallel.recompute=none,{','.join(numbers)}"]), replace(ARGS, top=30)).plans
    for number, seconds in alone.items():
        own = [plan.total for plan in found if plan.training.parallel.recompute is Recompute(number)]
        assert min(own) == pytest.approx(seconds, rel=1e-9), number


def test_the_first_plan_is_the_same_however_few_are_shown() -> None:
    """Also where it comes of one that was not the first."""
    memory = (with_memory(10.0), "model.sequence_length=2048", "train.precision=bf16", "parallel.global_batch_size=32")
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", *memory]
    (alone,), ten = (best_plans(read(words), replace(ARGS, top=top)).plans for top in (1, 10))
    assert alone.total == ten[0].total < 0.95 * ten[1].total


@pytest.mark.slow
def test_no_plan_of_a_hundred_that_computes_few_layers_again_is_faster_than_the_first() -> None:
    """Though all plans of its sizes come far behind others that compute all or no layers again."""
    sizes = ("model.sequence_length=2048", "train.precision=bf16", "parallel.global_batch_size=32")
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", with_memory(12.0), *sizes]
    first, *others = best_plans(read(words), replace(ARGS, top=100)).plans
    again = [plan for plan in others if plan.training.parallel.recompute is Recompute.full]
    every = [relieved(plan, math.inf, shares=False, offloads=False) for plan in again]
    assert first.total <= min(plan.total for plan in every if plan is not None) * (1 + 1e-9)
    assert first.total < 0.96 * others[0].total


def test_a_front_has_plans_that_compute_few_layers_again_as_a_search_on_its_nodes_does() -> None:
    """Of one node, too, on which no plan that computes all or no layers again is cheaper than the best on two."""
    sizes = ("model.sequence_length=2048", "train.precision=bf16", "parallel.global_batch_size=32")
    sizes = (*sizes, "parallel.offload=none")  # offloading is faster there
    words = ["cluster=a10x8", "cluster.groups.gpu2.price_per_hour=8", "model=xl", with_memory(10.0), *sizes]
    kept = front(read([*words, "cluster.groups.gpu2.count=2"]), Arguments(pareto=First.cost)).plans
    for nodes, plan in enumerate(kept, 1):
        alone = best_plans(read([*words, f"cluster.groups.gpu2.count={nodes}"]), replace(ARGS, leave_out=False, top=1))
        assert len(plan.nodes) == nodes
        assert plan.total == pytest.approx(alone.plans[0].total, rel=1e-3)
        assert plan.training.parallel.recompute not in (Recompute.none, Recompute.full)


def test_a_front_has_plans_that_offload_and_compute_few_layers_again() -> None:
    """On two nodes nothing fits without offloading, and no plan that computes all or no layers again is cheaper than
    those on more nodes."""
    words = ["cluster=a10x8", "cluster.groups.gpu2.gpus_per_node=1", "cluster.groups.gpu2.price_per_hour=2.22"]
    words += ["model=xl", "model.layers=23", "model.hidden=2048", "model.heads=16", "train.precision=fp32"]
    words += [with_memory(10.0), "parallel.global_batch_size=24", "cluster.groups.gpu2.inter_gbit_per_s=200"]
    kept = front(read([*words, "cluster.groups.gpu2.count=4"]), Arguments(pareto=First.cost)).plans
    alone = best_plans(read([*words, "cluster.groups.gpu2.count=2"]), replace(ARGS, leave_out=False, top=1)).plans[0]
    (found,) = [plan for plan in kept if len(plan.nodes) == 2]
    assert found.total == pytest.approx(alone.total, rel=1e-3)
    assert found.parallel.offload == "optimizer" and len(found.training.parallel.recompute.stages) == 2


def test_a_plan_offloads_and_computes_few_layers_again_where_others_fit() -> None:
    """On two nodes some plans fit without offloading; on one none does."""
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=2", "cluster.groups.gpu2.inter_gbit_per_s=3", "model=xl"]
    words += ["train.precision=bf16", "parallel.global_batch_size=24", with_memory(6.0), "parallel.data=1"]
    words += ["cluster.gpus.a10.host_gb_per_s=10", "parallel.pipeline=4", "parallel.schedule=zb_h1,one_f_one_b"]
    found, asked = (best_plans(read([*words, *more]), ARGS).plans[0] for more in ([], ["parallel.offload=optimizer"]))
    assert str(found.parallel.recompute) == "full:3-none-none-none" and found.parallel.offload == "optimizer"
    assert found.total <= asked.total * (1 + 1e-9)


def test_a_front_looks_first_at_layers_computed_again_on_the_nodes_of_its_fastest_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is little time for them, which sets of fewer nodes would take."""
    looked_at = list[int]()

    def look(*given: object) -> list[Plan]:
        (space, *_) = cast(list[Space], given[4])
        looked_at.append(sum(space.nodes))
        return []

    monkeypatch.setattr(front_search, "relieved_plans", look)
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=3", "model=xl", with_memory(10.0), "train.precision=bf16"]
    front(read([*words, "parallel.global_batch_size=8"]), Arguments(pareto=First.time))
    assert looked_at == [3, 1, 2] * 10  # without offloading, and with each way to offload and stage of ZeRO


def test_a_front_of_which_nothing_fits_says_what_was_tried_last() -> None:
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.groups.gpu2.price_per_hour=8", "model=xl"]
    told = r"not even with parallel\.zero=3 and parallel\.offload=both; what would help: (?!.*recompute)"
    with pytest.raises(SearchError, match=told):
        front(read([*words, with_memory(0.5), "parallel.global_batch_size=8"]), Arguments(pareto=First.time))


@pytest.mark.parametrize(("seconds", "found"), [(math.inf, True), (0.0, False)], ids=["in time", "too late"])
def test_tight_plans_are_looked_for_until_the_time_is_up(seconds: float, found: bool) -> None:
    inputs = read([*WORDS, "train.precision=bf16", with_memory(10.0)])
    spaces = [Space(inputs.training, inputs.kinds, inputs.choices)]
    assert bool(tight_plans(spaces, math.inf, seconds)) is found
