"""The bounds that `benchmarks/layout_bounds.py` compares with brute force, of a few of its clusters."""

from __future__ import annotations

import pytest

from benchmarks.layout_bounds import bounds_of


@pytest.mark.parametrize("seed", [1, 102, 282])
def test_no_bound_is_above_the_fastest_partition(seed: int) -> None:
    """Of 282, some have GPipe's last micro-batches wait for an optimizer step behind another stage's first ones."""
    for taken, bounds in bounds_of(seed):
        assert all(bound <= taken * (1 + 1e-9) for bound in bounds.values()), bounds
