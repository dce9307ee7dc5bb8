"""Lines of a log in which other processes' lines may have landed: looked at ahead, and put together again."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

AHEAD = 24
"""How many lines may lie between the parts of one that was cut."""
ALIKE = 24
"""How many characters at the begin of what landed inside may look as if they belonged there."""

_OF_NUMBERS = frozenset("0123456789.E+-")


def anything(match: re.Match[str]) -> bool:
    """Accepts every match."""
    return True


class Lines:
    """Lines without their ends."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._ahead: deque[str] = deque()
        self._cut = False
        self._read = 0

    def __iter__(self) -> Iterator[str]:
        while self._ahead or self._more():
            yield self._ahead.popleft()

    def _more(self) -> bool:
        line = next(self._lines, None)
        if line is None:
            return False
        self._read += 1
        self._cut = not line.endswith("\n")
        self._ahead.append(line[: None if self._cut else -1])
        return True

    @property
    def number(self) -> int:
        """That of the line that was given last, from 1."""
        return self._read - len(self._ahead)

    def peek(self, index: int) -> str | None:
        """The line that comes so many lines after the next; None after the last."""
        while len(self._ahead) <= index:
            if not self._more():
                return None
        return self._ahead[index]

    @property
    def at_cut(self) -> bool:
        """Whether the line that was given last has no end: the file was cut there, or is being written."""
        return self._cut and self.peek(0) is None

    def mend(
        self,
        line: str,
        literal: str,
        characters: str,
        pattern: re.Pattern[str],
        accept: Callable[[re.Match[str]], bool] = anything,
    ) -> re.Match[str] | None:
        """Puts a line that was given together with its other part, and what landed between them back.

        None if there is no such part. Of several ways, the one in which most was there before the other line.

        Args:
            literal: how the whole line begins.
            characters: what may come after that.
            pattern: of the whole line.
            accept: whether the whole line can be.
        """
        length = _common(line, literal)
        if length == len(literal):
            length = len(line) - len(line[length:].lstrip(characters))
        for index in range(AHEAD if length else 0):
            other = self.peek(index)
            if other is None:
                return None
            if length > len(literal) and other.lstrip(characters):
                continue
            for cut in range(length, max(length - ALIKE, 0), -1):
                match = pattern.fullmatch(line[:cut] + other)
                if match is not None and accept(match):
                    del self._ahead[index]
                    self._ahead.appendleft(line[cut:])
                    return match
        return None

    def rejoin(
        self, line: str, begin: int, ending: str, accept: Callable[[str], bool] = bool, longest: int = 4096
    ) -> str | None:
        """The same for a line into which anything may have landed, after its first `begin` characters.

        None also where the cut is inside a number: a digit of the other line would change it.

        Args:
            ending: what the other part has in it.
            accept: whether the whole line can be.
            longest: characters of both parts, so that nothing takes long.
        """
        for index in range(AHEAD):
            other = self.peek(index)
            if other is None:
                return None
            if ending in other and len(line) + len(other) <= longest:
                cuts = (cut for cut in range(len(line), begin - 1, -1) if accept(line[:cut] + other))
                cut = next(cuts, None)
                if cut is not None and not {line[cut - 1], other[0]} <= _OF_NUMBERS:
                    del self._ahead[index]
                    self._ahead.appendleft(line[cut:])
                    return line[:cut] + other
        return None


def _common(line: str, literal: str) -> int:
    """How many characters both begin with."""
    length = min(len(line), len(literal))
    if line[:length] == literal[:length]:
        return length
    return next(i for i in range(length) if line[i] != literal[i])
