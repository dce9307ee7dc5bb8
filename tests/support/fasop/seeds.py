"""Seeds of random cases: the same ones in every run, and a new one in each that is not CI's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

KEPT = (2829190271,)
"""Seeds that once made a test fail; every test of random cases tries them."""


def seeds(count: int) -> Iterator[int]:
    """`KEPT`, the first `count` numbers, and one that nobody has tried, from `fresh`.

    Each is printed before it is used, so that a failing test names it last; it then belongs into `KEPT`.
    """
    new = fresh()
    for seed in (*KEPT, *range(count), *(() if new is None else (new,))):
        print(f"TDPP_SEED={seed}")
        yield seed


def fresh() -> int | None:
    """`TDPP_SEED`, or else a new one each time; None with `CI=true`, where a change is judged by what it changes."""
    if given := os.environ.get("TDPP_SEED"):
        return int(given)
    return None if os.environ.get("CI") else secrets.randbelow(2**32)
