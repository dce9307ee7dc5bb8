"""What becomes of a driver's file, while it is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from conf.pipedream.driver import Driver


@dataclass
class Reading:
    """Words of the command line, what is to be said, and what is refused: a line each."""

    driver: Driver
    given: tuple[str, ...]
    words: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        """Whether the command line gives it."""
        return any(word.lstrip("+").startswith(f"{key}=") for word in self.given)

    def number(self, key: str, default: float) -> float:
        """The command line's, if that gives one number."""
        for word in self.given:
            name, _, value = word.lstrip("+").partition("=")
            if name == key and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", value):
                return float(value)
        return default
