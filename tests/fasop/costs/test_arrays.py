"""Short ways of numpy give what numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.costs.arrays import rolled


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (5, 6)], ids=str)
def test_rows_and_columns_are_rolled(shape: tuple[int, int], by: int, axis: int) -> None:
    values = np.arange(float(np.prod(shape))).reshape(shape)
    assert (rolled(values, by, axis) == np.roll(values, by, axis=axis)).all()
