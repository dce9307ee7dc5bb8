"""A prediction says of one plan what the search says, and where every second of every stage goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from conf.schema.experiment import Experiment
from fasop.errors import SearchError
from fasop.search.inputs import read
from fasop.simulation.iteration import GRADIENTS, NORM, OPTIMIZER, replay
from fasop.simulation.predict import predict, predict_plan
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.support.fasop.plans import MEGATRON, built, column, experiment, mixed
from tests.support.fasop.searches import search, space

SLOW = ("cluster.groups.gpu2.inter_gbit_per_s=0.5",)
"""A message of GPT-2 XL in 16 bit takes 0.21 s, where four ranks share a node's link."""
CHUNKED = ("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=0-4-4-4-4-4-4-0-2-4-4-4-4-4-2-0")
SCHEDULES = {
    "gpipe": ("parallel.schedule=gpipe",),
    "1f1b": (),
    "zb-h1": ("parallel.schedule=zb_h1",),
    "interleaved": CHUNKED,
}


def test_the_seeds_measured_run_is_predicted_within_5_percent() -> None:
    assert predict(experiment(*MEGATRON)).iteration_s == pytest.approx(1.40, rel=0.05)


@pytest.mark.parametrize("one", [experiment(), mixed()], ids=["8-a10", "1-a100-7-a10"])
def test_one_plan_takes_what_the_search_says(one: Experiment) -> None:
    order = [0] * 8 if one.name == "seed_a10x8" else [0] + [1] * 7
    searched = built(one, order).iteration(column(*one.partition.layers))[0]
    assert predict(one).iteration_s == pytest.approx(searched, rel=1e-12)


def test_every_plan_of_a_search_can_be_predicted_alone() -> None:
    inputs = read(["experiment=seed_a100x1_a10x7"])
    for plan in search(space(inputs.training, inputs.kinds), 10).plans:
        alone = predict_plan(plan)
        assert alone.iteration_s == pytest.approx(plan.total, rel=1e-12)
        assert all(stage.memory_gib <= stage.limit_gib for stage in alone.stages)


@pytest.mark.parametrize("engine", [("train.precision=fp16",), MEGATRON], ids=["tdpp", "megatron-lm"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_on_a_slow_network_one_plan_takes_what_the_search_says(name: str, engine: tuple[str, ...]) -> None:
    """Where messages wait for their links, or stages for their messages."""
    one = mixed(*SCHEDULES[name], *engine, *SLOW)
    searched = built(one, [0] + [1] * 7).iteration(column(*one.partition.layers))[0]
    assert predict(one).iteration_s == pytest.approx(searched, rel=1e-12)
    assert predict(one).iteration_s > predict(mixed(*SCHEDULES[name], *engine)).iteration_s


def test_on_a_slow_network_messages_in_8_bits_are_faster_as_the_search_says_too() -> None:
    """In fp16, as if the network had 1.97 times the bandwidth."""
    one = mixed("train.precision=fp16", "parallel.compress=int8", *SLOW)
    searched = built(one, [0] + [1] * 7).iteration(column(*one.partition.layers))[0]
    assert predict(one).iteration_s == pytest.approx(searched, rel=1e-12)
    assert predict(one).iteration_s < predict(mixed("train.precision=fp16", *SLOW)).iteration_s


def test_gradients_that_are_summed_after_each_micro_batch_take_a_slow_network_as_often() -> None:
    for gbit_per_s, longer in ((20, True), (4000, False)):
        links = [f"cluster.groups.{group}.intra_gbit_per_s={gbit_per_s}" for group in ("hgx", "gpu2")]
        sizes = ("parallel.data=2", "parallel.pipeline=16", "parallel.partition=null")
        sharded, scattered, gathered = (
            mixed("train.precision=fp16", *links, *sizes, f"parallel.zero={zero}") for zero in (1, 2, 3)
        )
        one, other = predict(sharded).iteration_s, predict(scattered).iteration_s
        searched = built(scattered, [0] + [1] * 7).iteration(column(*scattered.partition.layers))[0]
        assert other == pytest.approx(searched, rel=1e-12)
        assert (other > 2 * one) == longer
        assert longer or other == pytest.approx(one, rel=1e-12)
        third = predict(gathered).iteration_s
        searched = built(gathered, [0] + [1] * 7).iteration(column(*gathered.partition.layers))[0]
        assert third == pytest.approx(searched, rel=1e-12)
        assert (third > 1.3 * other) == longer


def test_more_micro_batches_take_a_slow_link_as_much_longer_as_it_needs_for_them() -> None:
    few, many = (
        predict(experiment("parallel.schedule=gpipe", "train.precision=fp16", *SLOW, f"parallel.global_batch_size={n}"))
        for n in (4 * 4, 4 * 32)
    )
    one = few.stages[0].times.busy_forward
    assert one == pytest.approx(0.21, rel=0.01)
    assert many.iteration_s - few.iteration_s >= 2 * 28 * one


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_megatron_lm_waits_for_what_it_sends(name: str) -> None:
    one = mixed(*SCHEDULES[name], *MEGATRON)
    found = predict(one)
    assert found.durations.blocking
    sends = [e for e in found.events if e.kind == "forward-send" and e.stage == 1 and e.micro_batch < 6]
    if name == "1f1b":
        assert all(e.end - e.start >= found.stages[1].times.send_forward * (1 - 1e-9) for e in sends)
    freely = replay(found.schedule, replace(found.durations, blocking=False))[0]
    assert freely < found.iteration_s
    lines, layers = built(one, [0] + [1] * 7), column(*one.partition.layers)
    for limit in (None, np.array([found.iteration_s * 1.01])):
        assert lines.iteration(layers, limit)[0] == pytest.approx(found.iteration_s, rel=1e-12)
    low = lines.iteration(layers, np.array([freely / 2]))[0]
    assert freely / 2 <= low <= found.iteration_s * (1 + 1e-12)


@pytest.mark.parametrize(
    "overrides",
    [*SCHEDULES.values(), (*SLOW, "parallel.schedule=gpipe"), (*SLOW, *MEGATRON)],
    ids=[*SCHEDULES, "slow-network", "megatron-lm"],
)
def test_the_terms_of_a_stage_are_all_of_the_iteration(overrides: tuple[str, ...]) -> None:
    one = mixed(*overrides)
    found = predict(one)
    for number, stage in enumerate(found.stages):
        assert sum(stage.terms.by_name().values()) == pytest.approx(found.iteration_s)
        assert min(stage.terms.by_name().values()) >= 0
        computed = sum(stage.times.forward) * one.parallel.micro_batches
        assert stage.terms.forward == pytest.approx(computed)
        assert (stage.terms.embedding > 0) == (number in (0, 7))


@pytest.mark.parametrize("overrides", [(), SLOW, MEGATRON, (*SLOW, *MEGATRON)], ids=["tdpp", "slow", "mlm", "slow-mlm"])
def test_no_stage_waits_for_longer_than_an_event_lasts(overrides: tuple[str, ...]) -> None:
    """Of an exchange with a neighbour the wait counts once."""
    found = predict(mixed(*overrides))
    for event, waited in zip(found.events, found.waiting, strict=True):
        assert 0 <= waited <= event.end - event.start


@pytest.mark.parametrize("overrides", SCHEDULES.values(), ids=SCHEDULES)
def test_events_of_a_stage_follow_each_other_without_a_gap(overrides: tuple[str, ...]) -> None:
    found = predict(mixed(*overrides))
    for number in range(8):
        events = [event for event in found.events if event.stage == number and event.kind != NORM]
        assert all(a.end == b.start for a, b in pairwise(events))
        assert events[-1].kind == OPTIMIZER
        assert any(event.kind == GRADIENTS for event in events)


def test_a_run_on_this_machine_can_be_predicted() -> None:
    """Its node has as many ranks as the plan needs."""
    one = experiment("experiment=demo")
    found = predict(one)
    assert [stage.layers for stage in found.stages] == [(1,), (3,)]
    assert found.iteration_s > 0


def test_chunks_have_their_own_times() -> None:
    found = predict(mixed("train.precision=fp16", *CHUNKED))
    layer = found.stages[2].times.forward[0] / 4
    assert found.stages[1].times.forward == pytest.approx([4 * layer, 4 * layer])
    first, last = found.stages[0].times.forward, found.stages[7].times.forward
    assert (first[0], last[0]) == (pytest.approx(0.159e-3), 0)  # the embedding alone; nothing
    assert last[1] == pytest.approx(2.118e-3)  # the head alone


def test_a_schedule_of_ones_own_may_have_chunks() -> None:
    named = experiment(*CHUNKED)
    own = experiment("parallel.schedule_file=own.json", *CHUNKED[1:])
    lists = schedule("interleaved", 8, 2, named.parallel.micro_batches)
    one, other = predict(named), predict(own, as_json(lists, 2, named.parallel.micro_batches))
    assert other.iteration_s == pytest.approx(one.iteration_s)
    assert [stage.memory_gib for stage in other.stages] == [stage.memory_gib for stage in one.stages]


def test_a_schedule_of_another_plan_is_told_for_what_it_is() -> None:
    """A run with such a file fails, and has no prediction; its page, and those it is compared on, are still made."""
    one = experiment("experiment=demo")
    other = as_json(schedule("one_f_one_b", 4, 1, 4), 1, 4)
    with pytest.raises(SearchError, match=r"^parallel.schedule_file: stages=4, but the plan has 2"):
        predict(one, other)
    with pytest.raises(SearchError, match=r"^parallel.schedule_file: actions must be, by stage"):
        predict(one, {**other, "stages": 2, "actions": [[["forward", 0, 0]], []]})
