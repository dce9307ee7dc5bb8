"""Ranks in few words, none of them lost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conf.visible import rank_ranges


@given(st.sets(st.integers(0, 40)))
def test_the_words_hold_each_rank_once(ranks: set[int]) -> None:
    spans = [part.split("-") for part in rank_ranges(ranks).split(", ") if part]
    assert [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)] == sorted(ranks)
    assert all(int(after[0]) - int(before[-1]) > 1 for before, after in pairwise(spans))
