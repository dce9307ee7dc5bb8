"""Values as Hydra reads them in a word of the command line."""

from __future__ import annotations

import re
from typing import Any


def in_word(value: Any) -> str:
    """Behind the `=` of a word."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_word, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {in_word(one)}' for key, one in value.items())}}}"
    if isinstance(value, str) and (value.lower() == "null" or not re.fullmatch(r"[\w./-]+", value)):
        return quoted(value)
    return str(value)


def quoted(text: str) -> str:
    """As Hydra's grammar takes a text with any character."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
