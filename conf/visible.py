"""Text that people read. A terminal obeys what it is shown: escape sequences of others could write to the clipboard
(OSC 52)."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters (Unicode's Cc), but for tab and line feed."""

LONGEST_WORD = 1000
LONGEST = 4000
"""Characters of a message that somebody still reads."""


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}{ending if count != 1 else ''}"


def shortened(text: str) -> str:
    """The same without the middle of what is too long to be read: of each word, and of it all."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda found: _ends(found[0], 300), text)
    return words if len(words) <= LONGEST else _ends(words, LONGEST // 2 - 50)


def _ends(text: str, kept: int) -> str:
    return f"{text[:kept]} … ({len(text)} characters) … {text[-kept:]}"


def visible(text: str) -> str:
    """The same with every control character as Python would write it, such as \\x1b; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
