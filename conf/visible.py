"""Text that people read. A terminal obeys what it is shown: escape sequences of others could write to the clipboard
(OSC 52)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters (Unicode's Cc), but for tab and line feed."""

LONGEST_WORD = 1000
LONGEST = 4000
"""Characters of a message that somebody still reads."""


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}{ending if count != 1 else ''}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """In ascending order, neighbours together: `0, 2-5, 7`."""
    numbered = enumerate(sorted(set(ranks)))
    runs = ([rank for _, rank in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def numbered(noun: str, numbers: Collection[int]) -> str:
    """A noun with the numbers that it stands for: `rank 3`, `ranks 0, 2-5`."""
    return f"{noun}{'s' * (len(numbers) > 1)} {rank_ranges(numbers)}"


_TIMES = ((0.001, "ms", 1.0), (1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 48 * 3600.0))
"""Units of time in seconds, and up to how many seconds each fits."""


def span(seconds: float, digits: int = 1) -> str:
    """A length of time in the unit that fits: `350 ms`, `9 s`, `12 min`, `3 h`, `5 days`. `digits`: significant ones,
    such as 3 for `2.92 h`; those before the point are always shown."""
    fits = (row for row in _TIMES if seconds < row[2] and (seconds or row[1] == "s"))
    size, unit, _ = next(fits, (86400.0, "days", math.inf))
    value = seconds / size
    decimals = max(0, digits - len(f"{value:.0f}"))
    return f"{value:,.{decimals}f} {unit}"


def size_text(size: float) -> str:
    """Bytes in the unit that fits: `350 bytes`, `1.5 MiB`, `24.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:g} bytes"
        size /= 1024
    return f"{size:.1f} GiB"


def loss_text(loss: float) -> str:
    """A loss with four decimals: `5.4770`; one that these do not fit as a power of ten: `8.363e+11`."""
    return f"{loss:.3e}" if 0 < abs(loss) < 0.001 or 1e6 <= abs(loss) < math.inf else f"{loss:.4f}"


NEAREST = 5
"""Names that a message lists where an unknown one was given."""
LONGEST_NAME = 100
"""Characters of it that are compared."""
CLOSE = 0.6
"""How much alike, of 1, a name must be to be meant."""


def _likeness(word: str, name: str) -> float:
    """From 0 to 1: of the whole names, or nearly as much of a part of the second (lr is much like train.lr)."""
    from difflib import SequenceMatcher  # few words are unknown

    def ratio(name: str) -> float:
        return SequenceMatcher(None, name, word).ratio()

    return max(ratio(name), *(0.95 * ratio(part) for part in re.split(r"[./]", name)), 0.8 * (word in name))


def nearest(word: str, known: Iterable[str], first: Sequence[str] = ()) -> str:
    """Which names an unknown one may stand for, as the part of a message; empty if nothing is known. `first`: those
    that are known to be meant, if any are."""
    word = word[:LONGEST_NAME].lower()
    others = [name for name in dict.fromkeys(known) if name not in first]
    by_likeness = sorted(others, key=lambda name: -_likeness(word, name[:LONGEST_NAME].lower()))
    found = [*first, *by_likeness][:NEAREST]
    if not found:
        return ""
    if not first and _likeness(word, found[0].lower()) < CLOSE:
        return f"the nearest are {', '.join(found)}; "
    return f"did you mean {', '.join(found[:-1])} or {found[-1]}? " if found[1:] else f"did you mean {found[0]}? "


def shortened(text: str) -> str:
    """The same without the middle of what is too long to be read: of each word, and of it all."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda found: _ends(found[0], 300), text)
    return words if len(words) <= LONGEST else _ends(words, LONGEST // 2 - 50)


def _ends(text: str, kept: int) -> str:
    return f"{text[:kept]} … ({len(text)} characters) … {text[-kept:]}"


def visible(text: str) -> str:
    """The same with every control character as Python would write it, such as \\x1b; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_PASSWORD = re.compile(r"(?<=://)[^/\s]*:[^/\s]*(?=@)")


def without_passwords(text: str) -> str:
    """The text with *** where a URL in it has a user's name and password."""
    return _PASSWORD.sub("***", text)
