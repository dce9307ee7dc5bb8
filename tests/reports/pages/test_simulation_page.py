"""The page of simulated trainings."""

from __future__ import annotations

import pandas as pd

from reports.pages.command_pages import _told_apart


def test_lines_that_are_the_same_are_drawn_once_with_all_their_names() -> None:
    first, other = pd.Series([1.0, 2.0], index=[0.0, 5.0]), pd.Series([1.0, 2.0], index=[0.0, 6.0])
    found = _told_apart([first.rename("a"), other.rename("b"), first.rename("elastic")])
    assert [one.name for one in found] == ["a, elastic", "b"]
    assert found[1].index.tolist() == [0.0, 6.0]
