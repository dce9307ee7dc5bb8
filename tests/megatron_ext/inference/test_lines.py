"""Lines in, lines out: all of a file, and those of a stream as they come."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import cast

import pytest

from megatron_ext.inference import lines as module
from megatron_ext.inference.lines import as_they_come, translated
from megatron_ext.inference.scoring import Scoring
from megatron_ext.inference.text import TextTokenizer
from megatron_ext.inference.translator import Translator


class Letters:
    """Translates a line into its letters, backwards, and notes how many lines came at once."""

    def __init__(self) -> None:
        self.together: list[int] = []

    def translate(self, sentences: list[list[int]], scoring: Scoring) -> list[list[int]]:
        self.together.append(len(sentences))
        return [one[::-1] for one in sentences]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def run(lines: Iterator[str], live: bool) -> tuple[Iterator[str], Letters]:
    letters = Letters()
    found = translated(lines, cast("Translator", letters), cast("TextTokenizer", letters), Scoring(), live)
    return found, letters


@pytest.mark.parametrize("live", [False, True])
def test_every_line_has_its_translation_in_order(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 4)
    given = ["ab\n", "\n", " cd \n", "e", "fg", "\n", "h"]
    found, letters = run(iter(given), live)
    assert list(found) == ["ba", "", "dc", "e", "gf", "", "h"]
    assert max(letters.together) <= 4
    assert list(run(iter(["a", "", "b"]), live)[0]) == ["a", "", "b"]
    assert list(run(iter([]), live)[0]) == []


def test_a_line_is_answered_before_the_next_one_is_given() -> None:
    answered = Event()

    def asking() -> Iterator[str]:
        yield "ab\n"
        assert answered.wait(20), "no answer"
        yield "cd\n"

    found, _ = run(asking(), live=True)
    assert next(found) == "ba"
    answered.set()
    assert list(found) == ["dc"]


def test_lines_that_are_there_go_together() -> None:
    found, letters = run((f"{number}\n" for number in range(1000)), live=True)
    assert len(list(found)) == 1000
    assert len(letters.together) < 100


def test_what_reading_raises_is_raised() -> None:
    def broken() -> Iterator[str]:
        yield "ab\n"
        raise OSError("gone")

    found = as_they_come(broken())
    with pytest.raises(OSError, match="gone"):
        list(found)
