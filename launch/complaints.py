"""What a run's stderr says besides warnings, like lines counted together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WARNING = re.compile(r"\b\w*Warning\b|\bWARNING\b|^\s*warnings\.warn\(|^W\d{4} |^\[W\d{3}")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


@dataclass(frozen=True)
class Complaint:
    """A line, how often it or one that differs only in numbers was written, and by which nodes."""

    text: str
    count: int
    nodes: tuple[str, ...]


def complaints(stderr: Mapping[str, str]) -> list[Complaint]:
    """Groups the lines of each node's stderr, in the order of their first appearance.

    Left out: warnings, the source line Python shows under one, and the indented part of a traceback.
    """
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    nodes: dict[str, dict[str, None]] = {}
    for node, text in stderr.items():
        for line in _telling(text.splitlines()):
            key = _CHANGING.sub("#", line)
            first.setdefault(key, line)
            counts[key] = counts.get(key, 0) + 1
            nodes.setdefault(key, {})[node] = None
    return [Complaint(first[key], counts[key], tuple(nodes[key])) for key in first]


def _telling(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        if line.strip() and not line[0].isspace() and not _WARNING.search(line) and "Traceback (most" not in line:
            yield line.strip()
