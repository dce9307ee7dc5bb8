"""What a run page needs to know of the verdict on a run, whoever gives it."""

from __future__ import annotations

from collections.abc import Sequence
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
