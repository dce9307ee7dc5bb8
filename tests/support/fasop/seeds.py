"""Seeds of random cases: the same ones in every run, and a new one in each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

KEPT = ()
"""Seeds that once made a test fail; every test of random cases tries them."""


def seeds(count: int) -> Iterator[int]:
    """`KEPT`, the first `count` numbers, and one that nobody has tried: `TDPP_SEED`, or a new one in every run.

    Each is printed before it is used, so that a failing test names it last; it then belongs into `KEPT`.
    """
    fresh = int(os.environ.get("TDPP_SEED") or secrets.randbelow(2**32))
    for seed in (*KEPT, *range(count), fresh):
        print(f"TDPP_SEED={seed}")
        yield seed
