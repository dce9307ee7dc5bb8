"""Where plans fit, but memory is short, other means to save it are compared with what the search came to first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasop.search.arguments import Arguments, First
from fasop.search.common_steps import Beside, later, means_of, plans_beside
from fasop.search.front_search import front
from fasop.search.inputs import Inputs, read, scattering
from fasop.search.run import best_plans

ONE_AND_ONE = (
    *("cluster=a100x1_a10x7", "cluster.groups.hgx.gpus_per_node=1", "cluster.groups.gpu2.count=1"),
    *("cluster.groups.gpu2.gpus_per_node=1", "model=llama-1b", "train.precision=bf16"),
    "parallel.global_batch_size=32",
)
"""A GPU of 40 and one of 24 GiB."""
ARGS = Arguments(top=1, by_stage=False)
MEANS = ("zero=2", "zero=3", "offload=optimizer", "zero=2 parallel.offload=optimizer", "shards=memory")


@pytest.mark.parametrize("layers", [24, 26, 40])
def test_where_only_parts_by_memory_fit_zero_and_offloading_are_compared_with_them(layers: int) -> None:
    words = [*ONE_AND_ONE, f"model.layers={layers}", "parallel.data=2"]
    first = best_plans(read(words), ARGS).plans[0]
    of_means = [best_plans(read([*words, *f"parallel.{means}".split()]), ARGS).plans[0].total for means in MEANS]
    assert first.total <= min(of_means) * (1 + 1e-9)
    alone = best_plans(read([*words, "parallel.shards=memory", "parallel.offload=none"]), ARGS).plans[0]
    assert first.total < 0.91 * alone.total
    assert first.training.offloads and first.parallel.shares is not None


def test_stages_that_differ_may_be_asked_for_where_only_parts_by_memory_fit() -> None:
    """It said that parallel.shards=memory, which nobody had given, excludes them."""
    words = [*ONE_AND_ONE, "model.layers=26", "parallel.data=2", "parallel.offload=none", "parallel.zero=1"]
    found, plain = (best_plans(read(words), replace(ARGS, by_stage=by_stage)).plans[0] for by_stage in (True, False))
    assert found.parallel.shards == "memory" and found.total == plain.total


def test_parts_by_memory_and_unequal_shares_are_compared_where_equal_parts_fit() -> None:
    """The fastest of three replicas has the least memory, and keeps the smallest part of what they share out."""
    links = (f"cluster.groups.{name}.inter_gbit_per_s=200" for name in ("hgx", "gpu2"))
    words = [*ONE_AND_ONE, *links, "cluster.groups.gpu2.count=2", "cluster.gpus.a100_40gb.memory_gib=12"]
    words = [*words, "cluster.gpus.a10.memory_gib=24"]
    found, equal, asked = (
        best_plans(read([*words, *more]), ARGS).plans[0]
        for more in ([], ["parallel.shards=equal"], ["parallel.shards=memory", "parallel.zero=2"])
    )
    assert found.parallel == asked.parallel
    assert found.total < 0.94 * equal.total


def test_stages_keep_what_they_have_room_for_where_offloading_is_not_what_fits_first() -> None:
    memory = ("cluster.gpus.a100_40gb.memory_gib=5", "cluster.gpus.a10.memory_gib=16")
    words = [*ONE_AND_ONE, "cluster.groups.gpu2.gpus_per_node=2", *memory, "parallel.schedule=one_f_one_b"]
    found, whole = (best_plans(read([*words, *more]), ARGS).plans[0] for more in ([], ["parallel.recompute=none"]))
    assert found.total < 0.9 * whole.total
    assert len({*found.training.parallel.offloads}) == 2


def test_a_front_looks_at_all_ways_to_offload_where_nothing_fits_without() -> None:
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.gpus.a10.memory_gib=4", "model=xl"]
    words += ["train.precision=fp16", "parallel.global_batch_size=3", "cluster.groups.gpu2.price_per_hour=5"]
    of_front, alone = (
        front(read([*words, *more]), Arguments(pareto=First.time)).plans[0].total
        for more in ([], ["parallel.offload=optimizer"])
    )
    assert of_front == best_plans(read(words), ARGS).plans[0].total < 0.83 * alone


def test_a_front_relieves_each_way_to_offload_by_itself() -> None:
    """As a search does: plans of one way crowded out those of another."""
    words = ["cluster=a10x8", "cluster.groups.gpu2.count=1", "cluster.gpus.a10.memory_gib=8", "model=xl"]
    words += ["train.precision=fp32", "parallel.global_batch_size=24", "cluster.groups.gpu2.price_per_hour=5"]
    of_front = front(read(words), Arguments(pareto=First.time)).plans[0].total
    assert of_front <= best_plans(read(words), ARGS).plans[0].total * (1 + 1e-9)


def test_a_replica_alone_is_not_looked_at_again_with_means_that_share_out() -> None:
    inputs = read([*ONE_AND_ONE, "cluster.gpus.a10.memory_gib=16"])
    assert scattering(inputs, 2).choices.replicated == (True,) and False in inputs.choices.replicated
    for other in _beside(inputs):
        sizes = [
            one for spaces in other.spaces for space in spaces for n in range(len(space)) for one in space.options(n)
        ]
        alone = any(one.parallel.data == 1 for one in sizes)
        assert sizes and alone == (other.inputs.training.parallel.zero is None and other.offloads)


def test_nothing_is_offloaded_beside_where_memory_is_large_nor_beside_plans_that_offload() -> None:
    inputs = read([*ONE_AND_ONE])
    means = means_of(inputs)
    offloaded = next(one for ways in means for one in ways if one.training.offloads)
    assert later(means[1:], inputs, inputs) and not later(means[1:], offloaded, inputs)
    roomy = read([*ONE_AND_ONE, "cluster.gpus.a100_40gb.memory_gib=800", "cluster.gpus.a10.memory_gib=400"])
    assert all(other.everywhere for other in _beside(roomy) if other.spaces)


def _beside(inputs: Inputs) -> list[Beside]:
    return plans_beside(inputs, later(means_of(inputs)[1:], inputs, inputs), [inputs.kinds], [inputs.kinds])
