"""Sets of nodes that are left out for their memory have no plan that fits."""

from __future__ import annotations

from itertools import product

import pytest

from fasop.search.inputs import read
from fasop.search.space.candidates import Space
from fasop.search.space.node_sets import clusters, described, with_room
from tests.support.cases import fast_first

SEED = ("experiment=seed_a100x1_a10x7", "cluster.groups.gpu2.count=3", "cluster.groups.gpu2.gpus_per_node=2")
WORDS = [
    ["train.precision=fp32"],
    ["train.precision=bf16"],
    ["train.precision=bf16", "train.ema=0.9"],
    ["train.precision=fp32", "parallel.zero=2", "parallel.sharded_optimizer=true"],
    ["train.precision=fp32", "parallel.zero=3", "parallel.sharded_optimizer=true"],
    ["train.precision=bf16", "parallel.zero=3", "parallel.sharded_optimizer=true"],
    ["train.precision=bf16", "parallel.offload=optimizer"],
    ["train.precision=bf16", "parallel.offload=both"],
    ["train.precision=fp16", "engine=megatron_lm", "engine.checkout=/opt/megatron-lm"],
    ["train.precision=bf16", "engine=megatron_core"],
    ["train.precision=bf16", "model=mixtral-8x7b", "engine=megatron_core"],
    ["train.precision=bf16", "model=t5-3b"],
]


@pytest.mark.parametrize(
    ("gib", "words"),
    fast_first(len(WORDS), product([4.0, 2.0, 9.0], WORDS)),
    ids=lambda one: " ".join(one) if isinstance(one, list) else None,
)
def test_sets_of_nodes_without_room_have_no_plan(words: list[str], gib: float) -> None:
    """Whatever the sizes, options and orders. With more memory hardly any set is left out."""
    memory = [f"cluster.gpus.{gpu}.memory_gib={gib}" for gpu in ("a10", "a100_40gb")]
    inputs = read([*SEED, *memory, "parallel.global_batch_size=8", *words], None)
    every = clusters(inputs.kinds)
    kept = with_room(inputs.training, every)
    left = [kinds for kinds in every if kinds not in kept]
    assert (gib > 4.0) or left
    for kinds in left:
        for uneven in (False, True):
            assert not any(True for _ in Space(inputs.training, kinds, inputs.choices, uneven=uneven).groups)


def test_a_set_with_room_for_one_copy_is_kept() -> None:
    """GPT-2 XL has 1.56 billion parameters of 16 bytes: 23.2 GiB."""
    for gib, count in ((2.9, 0), (3.0, 1)):
        inputs = read(["experiment=seed_a10x8", "train.precision=fp32", f"cluster.gpus.a10.memory_gib={gib}"], None)
        two = [kinds for kinds in clusters(inputs.kinds) if kinds[0].group.count == 2]
        assert len(with_room(inputs.training, two)) == count


def test_sets_that_cannot_hold_the_model_are_told_apart_from_those_that_are_searched() -> None:
    for gib, said in ((24.0, "8 sets of nodes"), (3.0, "7 sets of nodes (1 more cannot hold the model)")):
        inputs = read(["experiment=seed_a10x8", "train.precision=fp32", f"cluster.gpus.a10.memory_gib={gib}"], None)
        assert described(inputs.training, inputs.kinds) == said
