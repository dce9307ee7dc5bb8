"""What libraries write on stderr when no memory is left, before they end their process."""

from __future__ import annotations

import re

from conf.visible import shortened

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


_OURS = re.compile(r"^(?:\[rank \d[^\]]*\] )?(?:tdpp: )?error: (.+)")
"""How our own programs begin an error; its remedy stands in the same line."""
_NO_ERROR = re.compile(
    r"^\s|\b\w*Warning\b|\bWARNING\b|^(srun|slurmstepd\S*): |^\[?W\d{3}|^During handling|^Current thread |^Traceback \("
)
"""Lines that say nothing of why: within a traceback, warnings, and that a step of Slurm has ended."""


def first_error(stderr: str) -> str | None:
    """The first error of ours; else the last line that says why, such as that of a traceback; None without any."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    ours = next((match[1] for line in lines if (match := _OURS.match(line))), None)
    said = ours or next((line for line in reversed(lines) if not _NO_ERROR.search(line)), None)
    return None if said is None else shortened(said)
