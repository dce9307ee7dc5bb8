"""The rules of a batch that adapts, and what is made of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_ext.contract.adaptive.config import (
    GOODPUT,
    NOISE,
    NONE,
    SIMILARITY,
    AdaptConfig,
    BatchRange,
    by_goodput,
    by_noise,
    by_similarity,
    lr_factor,
)
from megatron_ext.contract.adaptive.controller import Controller, Decision
from megatron_ext.contract.adaptive.noise import Halves
from megatron_ext.contract.adaptive.shares import Times

CONFIG = AdaptConfig(NOISE, 0.3, 64, 4096, 100, 0.1, 1, "sqrt", rebalance=False)


def measured(similarity: float, samples: int) -> Halves:
    """Halves of length 1 with this cosine, of a batch of so many samples."""
    return Halves(0.25, (1 + similarity) / 2, 0.25 * (1 + similarity), 0.5, samples // 2, samples // 2)


def public(batch: int, found: float, target: float, rate: float, size: int, lower: int, upper: int) -> int:
    """JABAS's rule for one local batch size, as its trainer and its configurator have it between the bounds."""
    wanted = batch * (1 + rate) if found < target else batch * (1 - rate)
    wanted = max(min(wanted, upper), lower)
    count = round(wanted / size)
    count += count % 2 if wanted > batch else -(count % 2)
    moved = count * size
    return moved if (moved > batch if wanted > batch else moved < batch) else batch


@pytest.mark.parametrize("size", [1, 8, 32, 48])
@pytest.mark.parametrize("found", [0.1, 0.5], ids=["grows", "shrinks"])
def test_the_rule_by_similarity_is_the_public_one_wherever_that_moves(size: int, found: float) -> None:
    lower, upper = 2 * size, 400 * size
    batches = BatchRange.between(lower, upper, size, 2)
    moves = 0
    for count in range(4, 380, 2):
        wanted = public(count * size, found, 0.3, 0.1, size, lower, upper)
        ours = by_similarity(count, found, 0.3, 0.1, batches) * size
        if wanted == count * size:
            assert ours == (count + (2 if found < 0.3 else -2)) * size, "there it stalls"
        else:
            assert ours == wanted
            moves += 1
    assert moves > 180 - 12


def test_the_first_moves_are_those_of_the_paper() -> None:
    batches = BatchRange.between(256, 4096, 32, 4)
    assert [by_similarity(count, 0.1, 0.3, 0.1, batches) * 32 for count in (8, 10)] == [320, 384]
    assert by_similarity(2, 0.1, 0.3, 0.1, BatchRange.between(64, 4096, 32, 2)) * 32 == 128  # 64 for ever, there


def test_a_rule_stays_within_its_bounds() -> None:
    batches = BatchRange.between(64, 100, 8, 3)
    assert batches == BatchRange(8, 8, 12)
    assert by_similarity(12, 0.1, 0.3, 0.1, batches) == 12
    assert by_similarity(8, 0.9, 0.3, 0.1, batches) == 8
    assert by_noise(10, math.inf, 0.3, batches) == 12
    assert by_noise(10, 1e-9, 0.3, batches) == 8
    with pytest.raises(ValueError, match="no even number of micro-batches of 8 samples, at least one for each of 14"):
        BatchRange.between(64, 100, 8, 14)


def test_the_rule_by_noise_goes_where_the_halves_are_alike_enough() -> None:
    allowed = BatchRange.between(64, 4096, 8, 1)
    scale = 700.0  # 0.3 is reached with 2 * 0.3 / 0.7 * 700 = 600 samples
    batches = [8]
    for _ in range(6):
        batches.append(by_noise(batches[-1], scale, 0.3, allowed))
    assert [8 * count for count in batches] == [64, 128, 256, 512, 608, 608, 608]
    assert by_noise(76, scale * 0.95, 0.3, allowed) == 76, "too little to move for"
    assert by_noise(128, scale, 0.3, allowed) == 76


def test_goodput_weighs_speed_against_what_a_sample_is_worth() -> None:
    batches = BatchRange.between(8, 4096, 8, 1)
    busy, launch = 0.001, 0.02

    def seconds(count: int) -> float:
        return launch + busy * count

    def goodput(count: int, scale: float) -> float:
        return 8 * count / seconds(count) * (scale + 64) / (scale + 8 * count)

    for scale in (50.0, 400.0, 3000.0):
        count, seen = 8, []
        while count not in seen:
            seen.append(count)
            count = by_goodput(count, scale, 64, lambda counts: [seconds(n) for n in counts], batches)
        best = max(range(2, 514, 2), key=lambda n, scale=scale: goodput(n, scale))
        assert goodput(count, scale) > goodput(best, scale) / 1.031
    assert by_goodput(8, math.inf, 64, lambda counts: [float(n) for n in counts], batches) == 8, "nothing is gained"


def test_decisions_wait_for_as_many_measurements_as_they_take_together() -> None:
    controller = Controller(replace(CONFIG, smoothing=3), 8, 64, [1, 1])
    shares, reasons = (4, 4), []
    for _ in range(3):
        decision = controller.decide(shares, measured(0.01, 64))
        reasons.append(decision.reason)
    assert reasons[:2] == ["1 of 3 measurements", "2 of 3 measurements"]
    assert decision.shares == (8, 8)
    assert decision.noise_scale == pytest.approx((1 - 0.01) / 0.01 * 32)
    again = Controller(replace(CONFIG, smoothing=3), 8, 64, [1, 1], controller.window)
    assert again.decide(shares, measured(0.01, 64)) == controller.decide(shares, measured(0.01, 64))


def test_a_larger_batch_is_shared_as_the_one_before() -> None:
    controller = Controller(CONFIG, 8, 64, [3, 1])
    assert controller.decide((6, 2), measured(0.01, 64)).shares == (12, 4)


def test_shares_follow_measured_times_where_that_gains_enough() -> None:
    controller = Controller(replace(CONFIG, rule=NONE, rebalance=True), 8, 64, [1, 1])
    even = controller.decide((4, 4), times=Times([0.1, 0.102], 0.42))
    assert even == Decision((4, 4), "the shares fit the measured times")
    slow = controller.decide((4, 4), times=Times([0.1, 0.3], 1.22))
    assert slow == Decision((6, 2), "other shares: 1220 -> 620 ms expected")
    assert controller.decide((6, 2), times=Times([0.1, 0.3], 0.62)).shares == (6, 2)
    assert controller.decide((6, 2), times=Times([0.2, 0.3], 1.22)).shares == (5, 3)


def test_goodput_takes_the_times_of_the_shares_that_it_would_have() -> None:
    controller = Controller(replace(CONFIG, rule=GOODPUT), 8, 64, [1, 1])
    times = Times([0.1, 0.1], 4.4)  # most of which no batch changes
    assert controller.decide((4, 4), measured(0.01, 64), times).shares == (8, 8)
    assert controller.decide((4, 4), measured(0.01, 64)).shares == (4, 4)


def test_the_learning_rate_follows_the_batch() -> None:
    assert [lr_factor(replace(CONFIG, lr_scaling=how), 256, 64) for how in ("none", "sqrt", "linear")] == [1, 2, 4]
    assert lr_factor(replace(CONFIG, rule=NONE), 256, 64) == lr_factor(None, 256, 64) == 1.0
    assert CONFIG.due(200)
    assert not CONFIG.due(150)
    assert not replace(CONFIG, rule=NONE).measures
    assert replace(CONFIG, rule=SIMILARITY).measures
