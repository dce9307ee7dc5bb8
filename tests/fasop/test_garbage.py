"""What a search changes of garbage collection is as before once it is over."""

from __future__ import annotations

import gc

import pytest

from fasop.garbage import seldom_collected


def test_a_search_that_fails_leaves_garbage_collection_as_it_was() -> None:
    known = gc.get_threshold()
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_threshold()[0] > known[0]
        raise KeyError
    assert gc.get_threshold() == known
