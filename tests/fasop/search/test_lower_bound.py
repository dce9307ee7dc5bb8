"""Bounds of sizes, over the options that a search tries with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.schema.experiment import Schedule
from fasop.search.inputs import read
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices
from tests.support.fasop.plans import MEGATRON

SLOW_LINKS = ("cluster=a10x8", "cluster.groups.gpu2.gpus_per_node=1", "model=small", "parallel.global_batch_size=8")


@pytest.mark.parametrize("engine", [(), MEGATRON], ids=["tdpp", "megatron_lm"])
@pytest.mark.parametrize("sharded", [(False,), (True,), (False, True)], ids=str)
def test_no_plan_beats_the_bound_where_replicas_mostly_sum_gradients(
    sharded: tuple[bool, ...], engine: tuple[str, ...]
) -> None:
    """A sharded optimizer sums in half the time, and takes some for handing out its weights."""
    inputs = read([*SLOW_LINKS, "train.precision=fp16", *engine])
    sizes = Choices(tensor=(1,), data=(8,), pipeline=(1,), micro_batch_size=(1,), schedule=(Schedule.one_f_one_b,))
    space = Space(inputs.training, inputs.kinds, replace(sizes, sharded_optimizer=sharded))
    keep = Best(1)
    seen = explore([space], keep)
    (plan,) = keep.plans
    assert plan.parallel.sharded_optimizer == sharded[-1]
    assert 0.7 * plan.total < space.bounds.min() <= plan.total * (1 + 1e-9)
    assert seen.least <= plan.total * (1 + 1e-9)
