"""Where sentences end: one simple rule, which needs no download (docs/data.md, "Sentences")."""

from __future__ import annotations

import re

_END = re.compile(
    r"""
    (?: [.!?…]+ ["'”’»)\]]* (?= \s )      # an end of a sentence, with what closes around it, before a space
      | [。！？｡]+ [”’」』）]*              # where no spaces are written
      | (?= \n\s*\n )                     # an empty line
    ) \s*
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")
_OPENING = "\"'“‘«([¿¡*-–—"
ABBREVIATIONS = frozenset(
    (
        *("al", "approx", "bd", "ca", "cf", "ch", "col", "dept", "dr", "ed", "eds", "eg", "est", "fig", "figs", "gen"),
        *("gov", "hon", "ie", "jr", "lt", "maj", "messrs", "mr", "mrs", "ms", "mt", "nos", "op", "p", "pp", "prof"),
        *("rev", "sec", "sen", "sgt", "sr", "st", "vol", "vols", "vs", "z.b", "d.h", "bzw", "e.g", "i.e", "ph.d"),
    )
)
"""Words that end in a full stop within a sentence."""


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the spaces around them; together they have all its words.

    A sentence ends with `.`, `!`, `?` or `…` before a space, where no lower-case letter follows; a full stop ends none
    after a single capital letter or one of `ABBREVIATIONS`. One also ends before an empty line, and with
    `。`, `！` or `？`.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        mark = text[end.start() : end.end()]
        if mark.strip() and not _ends(text[start : end.start()], mark.strip(), text[end.end() : end.end() + 2]):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def _ends(before: str, mark: str, after: str) -> bool:
    first = after.lstrip(_OPENING)[:1]
    if first.islower():
        return False
    if mark != ".":
        return True
    word = _LAST_WORD.search(before[-30:] + mark)
    if word is None:
        return True
    single_capital = len(word[1]) == 1 and word[1].isupper() and word[1] != "I"
    return not single_capital and word[1].lower() not in ABBREVIATIONS
