"""Names of neighbouring blocks in few words."""

from __future__ import annotations

import re
from typing import List, Sequence, Tuple

_MOST_ROWS = 3
"""That are named one by one."""


def in_words(names: Sequence[str]) -> str:
    """`encoder.0-3 + norm`: neighbours whose names differ by a number are a row; of many rows, first and last name."""
    rows = _rows(names)
    if len(rows) > _MOST_ROWS:
        return f"{names[0]} to {names[-1]} ({len(names)})"
    return " + ".join(first if first == last else f"{first}-{_split(last)[1]}" for first, last in rows)


def _rows(names: Sequence[str]) -> List[Tuple[str, str]]:
    """First and last name of each row."""
    rows: List[Tuple[str, str]] = []
    for name in names:
        stem, number = _split(name)
        if rows and number >= 0 and _split(rows[-1][1]) == (stem, number - 1):
            rows[-1] = rows[-1][0], name
        else:
            rows.append((name, name))
    return rows


def _split(name: str) -> Tuple[str, int]:
    """`layers.7` -> ("layers.", 7); a name without a number has -1."""
    found = re.fullmatch(r"(.*\.|)([0-9]{1,9})", name)
    return (name, -1) if found is None else (found[1], int(found[2]))
