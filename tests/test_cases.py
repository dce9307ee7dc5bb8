"""What stands for a whole product of cases."""

from __future__ import annotations

import itertools

import pytest

from tests.support import cases

AXES = ((1, 2, 3), "abcd", (True, False), ("x", "y", "z"))
PRODUCT = list(itertools.product(*AXES))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "thorough", False)


def test_any_two_values_occur_together_in_a_few_cases() -> None:
    found = cases.pairwise(*AXES, always=[(3, "d", False, "z")])
    for first, second in itertools.combinations(range(len(AXES)), 2):
        assert {(case[first], case[second]) for case in found} == set(itertools.product(AXES[first], AXES[second]))
    assert (3, "d", False, "z") in found
    assert len(found) <= len(PRODUCT) / 3


def test_any_value_occurs_in_fewer_still() -> None:
    found = cases.each(*AXES)
    assert [{*axis} for axis in zip(*found, strict=True)] == [{*axis} for axis in AXES]
    assert len(found) == 4


def test_what_is_drawn_is_the_same_again_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cases.drawn(PRODUCT, 10, always=PRODUCT[:2])
    assert found == cases.drawn(PRODUCT, 10, always=PRODUCT[:2]) == sorted(found, key=PRODUCT.index)
    assert found[:2] == PRODUCT[:2] and len(found) == 12
    monkeypatch.setenv("TDPP_SEED", "7")
    assert found != cases.drawn(PRODUCT, 10, always=PRODUCT[:2])


def test_every_option_of_any_case_occurs_in_a_few_cases() -> None:
    found = cases.covering(PRODUCT, enumerate, always=[(3, "d", False, "z")])
    assert {option for case in found for option in enumerate(case)} == {o for case in PRODUCT for o in enumerate(case)}
    assert (3, "d", False, "z") in found and len(found) == 4 and found == sorted(found, key=PRODUCT.index)


def test_thorough_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "thorough", True)
    assert cases.drawn(PRODUCT, 1) == cases.each(*AXES) == cases.pairwise(*AXES) == PRODUCT
    assert cases.covering(PRODUCT, enumerate) == PRODUCT
    assert cases.fewer(1, 5) == 5


def test_a_kept_case_that_is_gone_is_noticed() -> None:
    with pytest.raises(ValueError, match="no cases of the product"):
        cases.drawn(PRODUCT, 1, always=[(9, "a", True, "x")])
