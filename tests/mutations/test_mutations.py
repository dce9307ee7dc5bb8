"""Every mistake of `make test-mutations` can still be made."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.mutations.mutations import ENGINE, JUDGE, MUTATIONS, SEARCH, Mutation
from tests.support import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.file}-{one.old.split()[0]}")
def test_its_old_text_occurs_once_and_its_test_is_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    path, _, name = mutation.test.partition("::")
    assert (ROOT / path).exists()
    assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_there_are_at_least_sixty_of_them_in_all_three_parts() -> None:
    assert len(MUTATIONS) >= 60
    assert min(map(len, (JUDGE, SEARCH, ENGINE))) >= 14
    assert Counter((one.file, one.old) for one in MUTATIONS).most_common(1)[0][1] == 1
