"""What is found out about a run, whoever judges it: the verdict, who brought it down, and what its nodes said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class LineGroup:
    """A line, how often it or one that differs only in numbers was written, and by which nodes."""

    text: str
    count: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The end of a file."""

    path: Path
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Who brought a run down, or keeps it from going on; the first one, where there are several."""

    node: str
    ranks: tuple[int, ...]
    """Its ranks that failed alike; none where the node itself is meant."""
    what: str
    """In words; a node's and a rank's name is not in them."""
    said: tuple[LastWords, ...]
    """Without what other ranks of the node say: of stderr first; none where it wrote nothing."""


class Verdict(Protocol):
    """How a run stands, by which rule, and on what evidence."""

    @property
    def state(self) -> str:
        """`succeeded`, `failed`, `running`, `stopped` …"""

    @property
    def rule(self) -> str:
        """Name of the rule that decided."""

    @property
    def exit_code(self) -> int: ...

    @property
    def reason(self) -> str:
        """One sentence."""

    @property
    def evidence(self) -> Sequence[str]: ...


@dataclass(frozen=True, kw_only=True)
class Findings(ABC):
    """All that is found out about a run from what its nodes say."""

    verdict: Verdict
    culprit: Culprit | None = None
    mismatches: tuple[str, ...] = ()
    """Where nodes run something else than was submitted, a sentence each."""
    stderr: tuple[LineGroup, ...] = ()
    """But for warnings; the likely cause first."""
    agents: tuple[LineGroup, ...] = ()
    """What agents printed that are gone without a result, or what kept them from starting."""
    warnings: tuple[LineGroup, ...] = ()
    """Where they were looked for: only a page has room for them."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing more will come."""
