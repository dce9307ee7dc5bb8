"""Linear programs of proofs: what they say is the least of the largest cut, also where many bases are equally good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fasop.partition.linear_program import MinimaxLP

CLOSE = 1e-6


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6])
def test_a_solution_is_in_its_box_and_takes_what_is_proved_however_many_bases_are_equally_good(seed: int) -> None:
    """A solution that is in the box and takes no more than the bound is the best one. Steps of the dual simplex go in
    circles in all but one of these boxes where amounts have no prices."""
    rng = np.random.default_rng(seed)
    stages, chunks, layers = 16, 3, 48
    of_stages = np.tile(np.eye(stages, dtype=np.int64), chunks)
    counts = rng.integers(0, 4, (60, stages * chunks)) * (rng.random((60, stages * chunks)) < 0.3)
    cuts = np.concatenate([counts, 3 * of_stages]).astype(float)
    problem = MinimaxLP(layers, stages * chunks, of_stages)
    problem.cut(cuts, np.zeros(len(cuts)))
    high = np.full(stages * (chunks + 1), layers)
    node = problem.root(0 * high, high)
    for step in range(25):
        solved = problem.solve(node)
        if not np.isfinite(solved.least):
            break
        values = problem.bounded @ solved.amounts
        assert (values >= node.low - CLOSE).all() and (values <= node.high + CLOSE).all()
        assert (cuts @ solved.amounts).max() <= solved.least + CLOSE
        assert solved.amounts.sum() == pytest.approx(layers)
        number = int(np.minimum(values % 1, 1 - values % 1).argmax())
        low, high = node.low.copy(), node.high.copy()
        if step % 3 == 2:
            high[number] = np.floor(values[number])
        else:
            low[number] = np.ceil(values[number])
        node = replace(solved.node, low=low, high=high)
    assert step > 5
