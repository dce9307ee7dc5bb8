"""With `train.save_interval=auto` a run loses about as little to saves and failures as with the best fixed interval."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

import pytest

from megatron_ext.checkpoints.pace import SavePace
from megatron_ext.contract.reliability import best_interval_s

FAILURES = 1000
RESTART_S = 120.0


class Rehearsal:
    """A run on nodes that fail at random, of which only the clock is real."""

    def __init__(self, iteration_s: float, save_s: float, mtbf_s: float) -> None:
        self.iteration_s, self.save_s, self.mtbf_s = iteration_s, save_s, mtbf_s
        self.now = 0.0

    def lost_s(self, trained: Callable[[Random, float], int]) -> float:
        """Seconds for each failure that are not training that was saved; `trained` gives the iterations saved by a
        start that ends after so many seconds."""
        random, saved, took = Random(1), 0, 0.0
        for _ in range(FAILURES):
            lives = random.expovariate(1 / self.mtbf_s)
            saved += trained(Random(random.random()), lives)
            took += RESTART_S + lives
        return (took - saved * self.iteration_s) / FAILURES

    def fixed(self, interval: int, random: Random, lives: float) -> int:
        now, saved = 0.0, 0
        while (now := now + interval * self.iteration_s + self.saves(random)) < lives:
            saved += interval
        return saved

    def auto(self, later: int, random: Random, lives: float) -> int:
        self.now = 0.0
        pace = SavePace(self.mtbf_s, 0, later, lambda: self.now)
        iteration = saved = 0
        wanted = set[int]()
        while (at := self.now + self.iteration_s) < lives:
            self.now = at
            iteration += 1
            if pace.wants(iteration):
                wanted.add(iteration + later)
            if iteration in wanted:
                took = self.saves(random)
                self.now += took
                if self.now >= lives:
                    break
                pace.tried(iteration, took, True)
                saved = iteration
        return saved

    def saves(self, random: Random) -> float:
        return self.save_s * random.uniform(0.8, 1.2)


@pytest.mark.parametrize(
    ("iteration_s", "save_s", "mtbf_s", "later"),
    [
        pytest.param(20.0, 5.0, 3 * 3600.0, 1, id="usual"),
        pytest.param(1.0, 0.2, 300.0, 1, id="short-saves"),
        pytest.param(30.0, 60.0, 3 * 3600.0, 1, id="long-saves"),
        pytest.param(40.0, 2.0, 1800.0, 1, id="nearly-every-iteration"),
        pytest.param(10.0, 10.0, 3600.0, 4, id="streams"),
    ],
)
def test_a_thousand_failures_cost_within_a_tenth_of_the_best_fixed_interval(
    iteration_s: float, save_s: float, mtbf_s: float, later: int
) -> None:
    run = Rehearsal(iteration_s, save_s, mtbf_s)
    around = best_interval_s(save_s, mtbf_s) / iteration_s
    intervals = {max(1, round(around * 2 ** (power / 2))) for power in range(-6, 7)}
    best = min(run.lost_s(partial(run.fixed, interval)) for interval in intervals)
    assert run.lost_s(partial(run.auto, later)) < 1.1 * best


def test_a_save_that_failed_is_tried_again_and_does_not_count_as_a_short_one() -> None:
    now = 0.0
    pace = SavePace(3600.0, 0, 1, lambda: now)
    wanted = []
    for iteration in range(1, 400):
        now += 1.0
        if pace.wants(iteration):
            wanted.append(iteration + 1)
        if iteration in wanted:
            pace.tried(iteration, 0.001, False)
    gaps = {after - before for before, after in pairwise(wanted)}
    assert gaps == {round(best_interval_s(1.0, 3600.0))}


@pytest.mark.parametrize(("mtbf_s", "often"), [(1e6, "277.8 hours"), (7200, "2.0 hours"), (150, "2.5 minutes")])
def test_time_between_failures_is_said_in_a_unit_that_fits(mtbf_s: float, often: str) -> None:
    said = SavePace(mtbf_s=mtbf_s, iteration=0, key="save_interval").describe()
    assert f"fails about every {often}, so the run saves every" in said
