"""What `tdpp doctor` says of one thing: fine or not, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """In the order of their weight."""

    ok = "ok"
    warning = "warning"
    """Runs would work, but not as they should."""
    error = "error"
    """A run would fail."""


_WEIGHT = list(Level)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line."""

    level: Level
    where: str
    """`here`, a node group, two of them, or `all nodes`."""
    what: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong with one node."""

    level: Level
    node: str
    text: str


def check(where: str, what: str, faults: Iterable[Fault], fine: str, advice: str = "") -> Check:
    """The worst fault gives the level; nodes with the same fault are named together; `fine` is said without any.

    `advice` is the way out of all of them.
    """
    nodes: dict[str, list[str]] = {}
    level = Level.ok
    for fault in faults:
        nodes.setdefault(fault.text, []).append(fault.node)
        level = max(level, fault.level, key=_WEIGHT.index)
    named = [f"{', '.join(names)}: {text}" for text, names in nodes.items()]
    text = "; ".join([*named, *([advice] if advice else [])]) if named else fine
    return Check(level=level, where=where, what=what, text=text)
