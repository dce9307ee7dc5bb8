"""Shares that follow measured times make unequal replicas as fast as expected, and change no loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.rebalancing import EVERY, FOLLOWING, RESIZING, SLOW_FROM, Pass, measured, resized

LONGER = 1.5
"""How many times as long as nothing but sleep an iteration may take on a busy machine."""


@pytest.mark.slow
def test_replicas_of_speeds_one_to_three_share_the_batch_as_they_can_and_again_when_one_slows_down(
    tmp_path: Path,
) -> None:
    """How much faster is the benchmark's to say: a busy machine makes iterations longer. Here the shares are right, and
    nothing but sleep would make them twice as fast."""
    even, followed = measured(tmp_path / "even"), measured(tmp_path / "followed", *FOLLOWING)
    assert followed.losses == pytest.approx(even.losses, rel=1e-5)
    first, shared, slow, again = followed.phases
    assert [phase.shares for phase in followed.phases] == [(4, 4), (6, 2), (6, 2), (5, 3)]
    assert len(first.took_ms) == EVERY
    assert SLOW_FROM + len(slow.took_ms) - 1 <= SLOW_FROM + 2 * EVERY
    assert first.ideal_ms / shared.ideal_ms == pytest.approx(2.0)
    assert min(shared.took_ms) < 0.8 * min(first.took_ms)
    expected = [float(found[1]) for reason in followed.reasons if (found := re.search(r"-> ([\d.]+) ms", reason))]
    for said, ideal in zip(expected, (shared.ideal_ms, again.ideal_ms), strict=True):
        assert 0.95 * ideal <= said <= LONGER * ideal
    assert min(again.took_ms) < LONGER * again.ideal_ms


@pytest.mark.slow
def test_replicas_that_are_pipelines_are_as_fast_as_their_slowest_stages(tmp_path: Path) -> None:
    """What a rank waits for its neighbours is not its work: replica 0 of both is three times as fast."""
    ran = measured(tmp_path / "followed", *FOLLOWING, stages=2, iterations=EVERY + 2)
    even, shared = ran.phases
    assert even.shares == (4, 4)
    assert shared.shares in ((7, 1), (6, 2)), "1590 and 1620 ms"
    expected = re.search(r"([\d.]+) -> ([\d.]+) ms", ran.reasons[0])
    assert expected is not None
    for said, ideal in zip(expected.groups(), (even.ideal_ms, shared.ideal_ms), strict=True):
        assert 0.9 * ideal <= float(said) <= LONGER * ideal
    assert min(shared.took_ms) < 0.8 * min(even.took_ms)


@pytest.mark.slow
def test_micro_batches_grow_where_larger_ones_are_faster(tmp_path: Path) -> None:
    """Each takes as long as the other, whatever its size; no loss knows of it."""
    quick = resized(tmp_path / "fixed", each=Pass(forward=0.0, backward=0.0))
    free = resized(tmp_path / "free", *RESIZING)
    assert [one.sizes for one in free] == [(1, 1)] * 2 + [(2, 2)] * 2 + [(4, 4)] * 3
    assert free[-1].shares == (3, 1)
    assert [one.loss for one in free] == pytest.approx([one.loss for one in quick], rel=1e-5)
    assert min(one.took_ms for one in free[-3:]) < 0.5 * min(one.took_ms for one in free[:2])
