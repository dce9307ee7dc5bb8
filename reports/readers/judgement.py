"""What a run page needs to know of the judgement on a run, whoever gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


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


class Complaint(Protocol):
    """A line of stderr, with how often it, or one that differs only in numbers, was written, and by which nodes."""

    @property
    def text(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def nodes(self) -> Sequence[str]: ...


class LastWords(Protocol):
    """The end of a file."""

    @property
    def path(self) -> Path: ...

    @property
    def lines(self) -> Sequence[str]: ...


class Culprit(Protocol):
    """Who brought a run down, or keeps it from going on."""

    @property
    def node(self) -> str: ...

    @property
    def ranks(self) -> Sequence[int]:
        """None where the node itself is meant."""

    @property
    def what(self) -> str:
        """What it did, or what became of it."""

    @property
    def said(self) -> Sequence[LastWords]:
        """The ends of its logs; of stderr first."""


class Findings(Protocol):
    """All that is found out about a run from what its nodes say."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def culprit(self) -> Culprit | None: ...

    @property
    def mismatches(self) -> Sequence[str]:
        """Where nodes run something else than was submitted, a sentence each."""

    @property
    def stderr(self) -> Sequence[Complaint]:
        """But for warnings; the likely cause first."""

    @property
    def agents(self) -> Sequence[Complaint]:
        """What agents printed that are gone without a result, or what kept them from starting."""

    @property
    def warnings(self) -> Sequence[Complaint]: ...
