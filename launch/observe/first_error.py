"""What a node's worker said on stderr before it ended with an error: the error itself, with its remedy."""

from __future__ import annotations

import re

from conf.visible import shortened

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
