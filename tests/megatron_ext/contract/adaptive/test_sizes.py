"""Which micro-batches replicas take where each may have several sizes: against all divisions that there are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from megatron_ext.contract.adaptive.config import NONE, AdaptConfig
from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.adaptive.shares import (
    NEAR,
    TRIAL,
    Measured,
    Replica,
    Times,
    Way,
    fastest_division,
    longest_of_division,
)
from megatron_ext.contract.schedule.iteration import SampleDivision

CONFIG = AdaptConfig(NONE, 0.3, 16, 16, 100, 0.1, 1, "sqrt", rebalance=True, micro_batch_sizes=[[2, 4, 8], [2, 4]])


def random_replica(source: random.Random, unit: int) -> Replica:
    """With several sizes, and of each of them some numbers of streams."""
    sizes = [unit, *source.sample([2 * unit, 3 * unit, 4 * unit], source.randint(0, 2))]
    ways = [Way(size, count) for size in sizes for count in (1, *source.sample([2, 3, 4], source.randint(0, 2)))]
    return Replica(
        {way: source.uniform(0.5, 1.0) * way.samples + source.uniform(0.0, 2.0) for way in ways}, source.random()
    )


@pytest.mark.parametrize("seed", range(100))
def test_no_division_of_the_samples_ends_sooner(seed: int) -> None:
    source = random.Random(seed)
    unit, least = source.choice([1, 2]), source.choice([1, 2])
    replicas = [random_replica(source, unit) for _ in range(source.randint(1, 3))]
    samples = unit * source.randint(1, 10)
    taken = [[(n, *way) for way in of.seconds for n in range(least, samples // way.size + 1)] for of in replicas]
    every = [SampleDivision(*map(tuple, zip(*one, strict=True))) for one in itertools.product(*taken)]
    ends = [longest_of_division(replicas, one) for one in every if one.samples == samples]
    found = fastest_division(replicas, samples, least)
    assert (found is None) == (not ends)
    if found is not None:
        assert found.samples == samples
        assert min(found.shares) >= least
        assert longest_of_division(replicas, found) <= (1.0 + 2 * NEAR) * min(ends)


def test_a_larger_size_is_tried_once_and_kept_where_it_is_faster() -> None:
    two, four, eight = Way(2), Way(4), Way(8)
    known = Measured([two, four, eight])
    known.note(two, 1.0)
    assert known.expected() == {two: 1.0, four: 2.0 * (1.0 - TRIAL)}
    known.note(four, 3.0)
    assert known.expected() == {two: 1.0, four: 3.0, eight: 6.0 * (1.0 - TRIAL)}, "8 is dearer than 2 even so"
    known.note(two, 2.0)
    assert known.expected()[four] == 6.0, "the replica is half as fast"
    later = Measured([two, four, eight])
    later.note(four, 3.0)  # where a run goes on
    assert later.expected() == {two: 1.5, four: 3.0, eight: 6.0 * (1.0 - TRIAL)}


def test_more_and_fewer_streams_are_tried_once() -> None:
    """Where fewer streams are there for larger micro-batches."""
    known = Measured([Way(2, 1), Way(2, 2), Way(2, 4), Way(4, 1), Way(4, 2)])
    known.note(Way(2, 2), 4.0)  # a second for each sample
    trial = 1.0 - TRIAL
    assert known.expected() == pytest.approx(
        {Way(2, 1): 2 * trial, Way(2, 2): 4.0, Way(2, 4): 8 * trial, Way(4, 2): 8 * trial}
    )
    known.note(Way(4, 2), 12.0)
    assert known.expected() == pytest.approx(
        {Way(2, 1): 2 * trial, Way(2, 2): 4.0, Way(2, 4): 8 * trial, Way(4, 1): 6 * trial, Way(4, 2): 12.0}
    )


def test_a_run_finds_the_streams_that_are_fastest_for_each_replica() -> None:
    """Replica 0 takes four micro-batches beside each other as fast as one; on replica 1 they wait for each other."""
    config = replace(CONFIG, micro_batch_sizes=None, streams=[[[1, 2, 4]], [[1, 2]]])
    controller, now, seen = Controller(config, 2, 24, [1, 1]), SampleDivision((6, 6), (2, 2)), []
    for _ in range(5):
        took = [-(-now.shares[0] // now.copies[0]) * 1.0, now.shares[1] * 1.0]
        each = [seconds / count for seconds, count in zip(took, now.shares, strict=True)]
        decision = controller.decide(now.shares, times=Times(each, max(took)), streams=now.copies)
        now = SampleDivision(decision.shares, (2, 2), decision.streams)
        assert now.samples == 24
        seen.append(now)
    assert seen[0].copies == (2, 2)
    assert seen[-1] == SampleDivision((11, 1), (2, 2), (4, 1)) == seen[-2], "three rounds; 9-3 would take as long"


def test_streams_that_stay_set_the_rounds_in_which_replicas_take_their_shares() -> None:
    """Three micro-batches of replica 0 take as long as one of replica 1, also before anything is measured."""
    controller = Controller(replace(CONFIG, micro_batch_sizes=None), 2, 16, [6, 2], streams=[3, 1])
    assert controller.fitted(24) == (9, 3)
    decision = controller.decide((6, 6), times=Times([1 / 3, 1.0], 6.0))
    assert decision == Decision((9, 3), "other shares: 6000 -> 3000 ms expected")


def test_a_run_finds_the_micro_batches_that_are_fastest_for_each_replica() -> None:
    """Replica 0 gains by every larger size; replica 1 loses by 4, and is slower by half later on."""
    takes = [{2: 1.0, 4: 1.4, 8: 2.0}, {2: 1.0, 4: 2.5}]
    controller, now, seen = Controller(CONFIG, 2, 16, [1, 1]), SampleDivision((4, 4), (2, 2)), []
    for slower in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0):
        seconds = [takes[0][now.sizes[0]], slower * takes[1][now.sizes[1]]]
        took = max(count * one for count, one in zip(now.shares, seconds, strict=True))
        decision = controller.decide(now.shares, times=Times(seconds, took + 0.5), sizes=now.sizes)
        now = SampleDivision(decision.shares, decision.sizes or (2, 2))
        assert now.samples == 16
        seen.append(now)
    assert seen[0].sizes == (4, 4)
    assert seen[2:4] == [SampleDivision((1, 4), (8, 2))] * 2
    assert seen[-1] == SampleDivision((3, 2), (4, 2)), "4.2 seconds, not 8"
    assert decision.reason == "the shares fit the measured times"


def test_a_pipeline_is_charged_for_the_time_in_which_it_fills() -> None:
    controller = Controller(replace(CONFIG, micro_batch_sizes=None), 2, 16, [1, 1])
    assert controller.decide((4, 4), times=Times([0.1, 0.1], 0.9, [0.0, 0.4])) == Decision(
        (6, 2), "other shares: 900 -> 700 ms expected"
    )
