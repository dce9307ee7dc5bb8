"""Short ways of numpy give what numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.costs.arrays import distinct, distinct_rows, rolled


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (5, 6)], ids=str)
def test_rows_and_columns_are_rolled(shape: tuple[int, int], by: int, axis: int) -> None:
    values = np.arange(float(np.prod(shape))).reshape(shape)
    assert (rolled(values, by, axis) == np.roll(values, by, axis=axis)).all()


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 1), (50, 2), (3, 40)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 300, 2**32 - 1])
def test_distinct_rows_are_those_of_numpy(shape: tuple[int, int], most: int) -> None:
    rows = np.random.default_rng(0).integers(0, most, shape, endpoint=True)
    for values in (rows, np.asfortranarray(rows), np.concatenate([rows, rows])[::2]):
        assert np.array_equal(distinct_rows(values), np.unique(values, axis=0))


@pytest.mark.parametrize("shape", [(0,), (1,), (40,), (6, 7)], ids=str)
def test_distinct_numbers_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 9, shape)
    assert np.array_equal(distinct(values), np.unique(values))
    assert np.array_equal(distinct(values / 4), np.unique(values / 4))
