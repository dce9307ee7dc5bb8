"""The least of the largest of linear functions, with what comes to it later as with all from the beginning."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.partition.linear_program import MinimaxLP
from tests.support.fasop.seeds import seeds


def test_amounts_that_come_later_are_mixed_as_if_they_had_been_there_from_the_beginning() -> None:
    """Mixtures of columns whose largest row is least, as in a game of two; the mean of rows is the other's answer."""
    for seed in seeds(20):
        rng = np.random.default_rng(seed)
        takes = rng.uniform(0, 1, (12, 8))
        later = MinimaxLP(1, 1)
        later.cut(takes[:1, :1], np.zeros(1))
        node = later.root(np.zeros(1, np.int64), np.ones(1, np.int64))
        for count in range(1, 8):
            later.cut(takes[count : count + 1, :count], np.zeros(1))
            node = later.widened(later.solve(node).node, takes[: count + 1, count])
        later.cut(takes[8:], np.zeros(4))
        found = later.solve(node)
        whole = MinimaxLP(1, 8)
        whole.cut(takes, np.zeros(12))
        expected = whole.solve(whole.root(np.zeros(8, np.int64), np.ones(8, np.int64)))
        assert found.least == pytest.approx(expected.least)
        assert (takes @ found.amounts).max() == pytest.approx(found.least)
        assert (later.weights(found.node) @ takes).min() == pytest.approx(found.least)
