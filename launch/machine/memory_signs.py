"""What libraries write on stderr when no memory is left, before they end their process."""

from __future__ import annotations

import re

_SIGNS = re.compile(
    r"bad_alloc|memoryerror\b|out ?of ?memory|can(not|'t) allocate memory|not enough memory|"
    r"memory allocation (still )?failed|failed to allocate memory|unable to allocate",
    re.IGNORECASE,
)
_OF_A_RANK = re.compile(r"\[rank \d+ \(")
"""What a rank says of its own end, which is in its error file too."""


def memory_sign(stderr: str) -> str | None:
    """The first line that says that memory ran out, other than for a rank that reported it itself."""
    lines = (line.strip() for line in stderr.splitlines())
    return next((line for line in lines if _SIGNS.search(line) and not _OF_A_RANK.match(line)), None)
