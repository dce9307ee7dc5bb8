"""Text of others for a terminal, which obeys what it holds: escape sequences could write to the clipboard (OSC 52)."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters (Unicode's Cc), but for tab and line feed."""


def visible(text: str) -> str:
    """The same with every control character as Python would write it, such as \\x1b; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
