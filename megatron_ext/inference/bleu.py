"""Corpus BLEU (Papineni et al. 2002) of lines of text, as sacreBLEU computes it if nothing else is asked for.

One reference, case kept, up to four words in a row, the words of mteval-v13a, and its smoothing: the first length of
which none is right counts as half a one, the next as a quarter. What lines give can be added up, so that several
ranks can each take some.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from typing import Iterable, List, Sequence

ORDER = 4
"""Words in a row, at most."""
NOTHING = [0] * (2 + 2 * ORDER)
"""The counts of no line."""
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_APART = re.escape("".join(sign for sign in string.punctuation if sign not in "',-."))
_RULES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (f"([{_APART}])", r" \1 "),
        (r"([^0-9])([.,])", r"\1 \2 "),
        (r"([.,])([^0-9])", r" \1 \2"),
        (r"([0-9])(-)", r"\1 \2 "),
    )
)


def words(text: str) -> List[str]:
    """Splits a line: signs are words of their own, but for points and commas in numbers."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, sign in _ENTITIES:
        text = text.replace(entity, sign)
    text = f" {text} "
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    return text.split()


def counts(found: str, reference: str) -> List[int]:
    """Counts of a translated line its words, its reference's, and by length the rows of words that are right, and
    all."""
    ours, theirs = words(found), words(reference)
    right, every = [], []
    for length in range(1, ORDER + 1):
        own = _rows(ours, length)
        right.append(sum((own & _rows(theirs, length)).values()))
        every.append(sum(own.values()))
    return [len(ours), len(theirs), *right, *every]


def added(parts: Iterable[Sequence[int]]) -> List[int]:
    """The counts of all lines."""
    return [sum(column) for column in zip(NOTHING, *parts)]


def score(total: Sequence[int]) -> float:
    """Returns BLEU, from 0 to 100, from the counts of all lines."""
    ours, theirs, right, every = total[0], total[1], total[2 : 2 + ORDER], total[2 + ORDER :]
    if not any(right) or not all(every):
        return 0.0
    halved, logarithms = 1.0, 0.0
    for hits, of in zip(right, every):
        if not hits:
            halved *= 2.0
        logarithms += math.log(100.0 * hits / of if hits else 100.0 / (halved * of))
    brevity = 1.0 if ours >= theirs else math.exp(1.0 - theirs / ours)
    return brevity * math.exp(logarithms / ORDER)


def _rows(found: Sequence[str], length: int) -> Counter[Sequence[str]]:
    return Counter(tuple(found[first : first + length]) for first in range(len(found) - length + 1))
