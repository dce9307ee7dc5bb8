"""What cannot be searched is one message that says what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from tests.support.fasop.searches import few, space, space_of


def test_what_fits_nowhere_says_what_would_do() -> None:
    one = read(["cluster=a10x8", "model=13b", "parallel.global_batch_size=64"])
    with pytest.raises(SearchError) as told:
        space(one.training, few(one.kinds, 1))
    text = str(told.value)
    assert (
        "model=13b with parallel.global_batch_size=64 does not fit in the memory of cluster.gpus (A10 22.2 GiB) with"
        in text
    )
    percent, times = re.findall(r"(\d+) % of this memory on every GPU; or (\d+) times as many nodes", text)[0]
    (a10,) = few(one.kinds, 1)
    larger = replace(a10, gpu=replace(a10.gpu, memory_gib=22.2 * int(percent) / 100))
    assert [*space(one.training, [larger]).groups]
    assert [*space(one.training, few(one.kinds, int(times))).groups]


@pytest.mark.parametrize("option", ["offload=optimizer", "zero=3", "shards=memory", "hierarchical_reduce=true"])
def test_what_no_launch_with_another_engine_accepts_is_not_searched_with_it(option: str) -> None:
    words = ["cluster=a10x8", "model=xl", "engine=megatron_core", "parallel.global_batch_size=64"]
    with pytest.raises(SearchError, match=rf"parallel\.{option} cannot be searched with engine=megatron_core.*use"):
        read([*words, f"parallel.{option}"])


def test_a_batch_that_no_replicas_divide_is_told_with_near_ones() -> None:
    one = read(["cluster=a10x8", "model=tiny", "parallel.micro_batch_size=1", "parallel.global_batch_size=6"])
    with pytest.raises(
        SearchError,
        match=r"is not divisible by any number of replicas that 256 GPUs .*: 16, 32, .*; the nearest divisible .* 16",
    ):
        space(one.training, few(one.kinds, 64))


def test_tensor_sizes_that_suit_nobody_are_told() -> None:
    one = read(["cluster=a10x8", "model=xl", "parallel.global_batch_size=64", "train.precision=fp16"])
    (a10,) = one.kinds
    assert a10.profile is not None
    only8 = replace(a10.profile, costs=[replace(a10.profile.costs[0], tensor=8)])
    with pytest.raises(
        SearchError, match=r"no tensor size suits .*gpu2: 4 GPUs per node, profile a10 with tensor sizes 8"
    ):
        space(one.training, [replace(a10, profile=only8)])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("parallel.tensor=x", "parallel.tensor=x must be a whole number, at least 1; separate several by commas"),
        ("parallel.recompute=ful", "parallel.recompute=ful must be none, selective, full, or full:N for N layers"),
        ("parallel.sharded_optimizer=1", "parallel.sharded_optimizer=1 must be true or false"),
        ("parallel.chunks=1", "parallel.chunks=1 must be at least 2, as in every interleaved schedule"),
        ("parallel.partition=24-24", "parallel.partition=24-24: the search itself finds the partition; leave it out"),
        ("parallel.node_order=gpu2*8", "the search itself finds the node order; leave it out"),
    ],
    ids=["size", "word", "flag", "chunks", "partition", "order"],
)
def test_a_value_that_is_none_is_told(word: str, message: str) -> None:
    with pytest.raises(SearchError, match=re.escape(message)):
        read(["experiment=seed_a10x8", word])


def test_sizes_that_are_given_and_impossible_are_told_with_those_that_are_not() -> None:
    inputs = read(["experiment=seed_a10x8", "parallel.tensor=3", "parallel.data=4"])
    with pytest.raises(
        SearchError, match=r"no plan for 32 GPUs has parallel.tensor=3 .*possible: tensor 1, 2, 4; data"
    ):
        space_of(inputs, 8)


def test_tensor_groups_of_latent_attention_are_refused_with_what_it_takes() -> None:
    latent = "engine.options.multi_latent_attention=true"
    inputs = read(["experiment=seed_a10x8", "engine=megatron_core", f"+{latent}", "parallel.tensor=2"])
    with pytest.raises(
        SearchError,
        match=f"parallel.tensor=2; possible: tensor 1; {latent} has no tensor groups, but takes parallel.context",
    ):
        space_of(inputs, 8)


def test_a_schedule_that_no_pipeline_can_run_is_told() -> None:
    inputs = read(["experiment=seed_a10x8", "parallel.schedule=interleaved", "parallel.pipeline=1"])
    with pytest.raises(
        SearchError, match=r"has parallel.schedule=interleaved parallel.pipeline=1: interleaved needs at least two"
    ):
        space_of(inputs, 8)


def test_a_batch_that_nothing_divides_is_told_with_a_rounder_one() -> None:
    asked = ["experiment=seed_a10x8", "parallel.global_batch_size=1000003"]
    with pytest.raises(
        SearchError, match=r"every plan for 32 GPUs has more than 4096 micro-batches .* such as 1000448"
    ):
        best_plans(read(asked), Arguments(top=1))


def test_a_module_that_was_not_measured_is_refused_in_one_message() -> None:
    words = ["model=module", "model.code=net.py:Net", "cluster.groups.local.gpus_per_node=2"]
    with pytest.raises(
        SearchError, match=r"needs the cost of each block, but profile 'cpu' has no times of modules; m"
    ):
        read([*words, "parallel.global_batch_size=8"])
