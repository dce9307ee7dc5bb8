"""What a run's stderr says besides warnings, like lines counted together, what others may follow from first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_WARNING = re.compile(r"\b\w*Warning\b|\bWARNING\b|^\s*warnings\.warn\(|^W\d{4} |^(\[rank\d+\]:)?\[W\d{3}")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
_DIGITS = b"0123456789"
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")
_END_OF_STEP = re.compile(
    r"^srun: (error: \S+: tasks? \S+: |forcing job termination|Job step aborted)|^slurmstepd\S*: error: "
    r"(\*\*\* STEP |spank: required plugin |Failed to invoke spank plugin stack)"
)
"""How Slurm reports that the step in which pyxis runs a worker has ended; why, it says before."""
_SYMPTOM = re.compile(
    r"[Cc]onnection (reset|closed|refused)|[Bb]roken pipe|remote process exit|[Ww]atchdog|communicator was aborted|"
    r"SignalException|SIGTERM"
)
"""How gloo, NCCL and torchrun say that another process went first."""


@dataclass(frozen=True)
class LineGroup:
    """A line, how often it or one that differs only in numbers was written, and by which nodes."""

    text: str
    count: int
    nodes: tuple[str, ...]


def grouped_lines(
    stderr: Mapping[str, bytes], causes: Sequence[str] = (), symptoms: Sequence[str] = ()
) -> list[LineGroup]:
    """Groups the lines of each node's stderr. `causes` and `symptoms` are what ranks reported of their ends, by time.

    First come lines that name a cause, last those of ranks that only lost another one; otherwise they are in the order
    of their first appearance, in that of the nodes: let the one that failed first be the first. Left out are warnings,
    the source line Python shows under one, and the indented part of a traceback.
    """
    return sorted(_grouped(stderr, _telling), key=lambda group: _order(group.text, causes, symptoms))


def last_words(text: str) -> str | None:
    """The last line of stderr that says more than that a step of Slurm has ended, or the last one of those."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not _END_OF_STEP.search(line)]
    return next(reversed(telling or lines), None)


def warnings(stderr: Mapping[str, bytes]) -> list[LineGroup]:
    """The warnings in each node's stderr, like ones together, the most frequent first."""
    return sorted(_grouped(stderr, _warning), key=lambda group: -group.count)


def _grouped(stderr: Mapping[str, bytes], chosen: Callable[[bytes], str | None]) -> list[LineGroup]:
    """Lines that differ only in numbers together, in the order of their first appearance; `chosen` gives a line's text,
    or None for one to leave out."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    nodes: dict[str, dict[str, None]] = {}
    for node, content in stderr.items():
        for line, count in _alike(content):
            if (text := chosen(line)) is not None:
                key = _CHANGING.sub("#", text)
                first.setdefault(key, text)
                counts[key] += count
                nodes.setdefault(key, {})[node] = None
    return [LineGroup(first[key], counts[key], tuple(nodes[key])) for key in first]


def _alike(content: bytes) -> list[tuple[bytes, int]]:
    """Counts lines that differ only in digits under the first of them: megabytes of them take milliseconds."""
    lines = content.translate(_LINE_ENDS).split(b"\n")
    shapes = content.translate(_LINE_ENDS, _DIGITS).split(b"\n")
    first = dict(zip(reversed(shapes), reversed(lines), strict=True))
    return [(first[shape], count) for shape, count in Counter(shapes).items()]


def _telling(line: bytes) -> str | None:
    """A line without the blanks around it; None for one to leave out."""
    text = line.decode(errors="replace")
    if not text.strip() or text[0].isspace() or _WARNING.search(text) or "Traceback (most" in text:
        return None
    return text.strip()


def _warning(line: bytes) -> str | None:
    """A warning without the blanks around it, None for any other line; Python's source line under one says nothing."""
    text = line.decode(errors="replace").strip()
    return text if _WARNING.search(text) and not text.startswith("warnings.warn(") else None


def _order(text: str, causes: Sequence[str], symptoms: Sequence[str]) -> tuple[int, int]:
    for number, cause in enumerate(causes):
        if cause and cause in text:
            return 0, number
    if _SYMPTOM.search(text) or _END_OF_STEP.search(text) or any(symptom and symptom in text for symptom in symptoms):
        return 2, 0
    return 1, 0
