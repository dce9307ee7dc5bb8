"""Which of many cases a run tries: a few that a seed draws, or with `--thorough` all of them.

The draw is the same in every run and process, so that a failing case has the same name when it is run again.
`TDPP_SEED=…` makes another one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

thorough = False
"""Set by tests/conftest.py, before any test is collected."""


def drawn(cases: Iterable[Case], count: int, always: Iterable[Case] = ()) -> list[Case]:
    """`always`, and `count` of the other cases, in the order of the cases."""
    cases, kept = list(cases), list(always)
    if absent := [case for case in kept if case not in cases]:
        raise ValueError(f"no cases of the product: {absent}")
    others = [number for number, case in enumerate(cases) if case not in kept]
    if thorough or len(others) <= count:
        return cases
    left_out = set(others) - set(_random().sample(others, count))
    return [case for number, case in enumerate(cases) if number not in left_out]


def pairwise(*axes: Sequence[Any], always: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Cases of the product of the axes, `always` among them: any two values of two axes occur together in one."""
    return _covering(2, axes, always)


def each(*axes: Sequence[Any], always: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Cases of the product of the axes, `always` among them: any value of an axis occurs in one."""
    return _covering(1, axes, always)


def covering(
    cases: Iterable[Case], options: Callable[[Case], Iterable[Hashable]], always: Iterable[Case] = ()
) -> list[Case]:
    """A few of the cases, `always` among them, which together have every option that any case has."""
    cases, kept = list(cases), list(always)
    if absent := [case for case in kept if case not in cases]:
        raise ValueError(f"not among the cases: {absent}")
    if thorough:
        return cases
    shuffled = [(case, set(options(case))) for case in _random().sample(cases, len(cases))]
    left = set().union(*(found for _, found in shuffled)).difference(*(options(case) for case in kept))
    while left:
        case, found = max(shuffled, key=lambda one: len(left & one[1]))
        kept.append(case)
        left -= found
    return [case for case in cases if case in kept]


def fewer(quick: int, all_of_them: int) -> int:
    """How many of a row of random cases are tried."""
    return all_of_them if thorough else quick


def fast_first(number: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All of them, of which `make test-fast` tries the first."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (at >= number)) for at, case in enumerate(cases)]


def _covering(together: int, axes: Sequence[Sequence[Any]], always: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    def parts(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(case), together))

    product = list(itertools.product(*axes))
    if thorough:
        return product
    kept = list(always)
    if absent := [case for case in kept if case not in product]:
        raise ValueError(f"no cases of the product: {absent}")
    uncovered = set().union(*map(parts, product)).difference(*map(parts, kept))
    shuffled = _random().sample(product, len(product))
    while uncovered:
        kept.append(max(shuffled, key=lambda case: len(uncovered & parts(case))))
        uncovered -= parts(kept[-1])
    return [case for case in product if case in kept]


def _random() -> random.Random:
    return random.Random(int(os.environ.get("TDPP_SEED", "0")))
