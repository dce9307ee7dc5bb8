"""BLEU is the figure of sacreBLEU, to the last digits."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU

from megatron_ext.inference import bleu

PIECES = (
    *(
        "the",
        "cat",
        "Cat",
        "3.5",
        "1,000",
        "don't",
        "a-b",
        "5-6",
        "x.",
        "(yes)",
        "ä",
        "你好。",
        "…",
        "$5",
        "9,",
        "e.g.",
    ),
    *("&quot;", "&amp;lt;", "&", "<skipped>", "'quoted'", "-", "--", "3-", "\\", "[a]", "a/b", "", " ", "\u00a0", "\t"),
)
LINES = st.lists(st.sampled_from(PIECES), max_size=9).map(" ".join) | st.text(max_size=12)
PAIRS = st.lists(st.tuples(LINES, LINES) | LINES.map(lambda line: (line, line)), min_size=1, max_size=6)


@given(pairs=PAIRS)
@example(pairs=[("", "")])
@example(pairs=[("a b c", "a b c")])
@example(pairs=[("a b c d", "a x c y")])
def test_it_is_sacrebleus(pairs: list[tuple[str, str]]) -> None:
    found, references = zip(*pairs, strict=True)
    theirs = BLEU().corpus_score(list(found), [list(references)]).score
    ours = bleu.score(bleu.added(bleu.counts(line, reference) for line, reference in pairs))
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)


@given(pairs=PAIRS, place=st.integers(0, 6))
def test_what_several_ranks_count_adds_up(pairs: list[tuple[str, str]], place: int) -> None:
    each = [bleu.counts(*pair) for pair in pairs]
    assert bleu.added([bleu.added(each[:place]), bleu.added(each[place:])]) == bleu.added(each)
    assert bleu.score(bleu.added([])) == 0.0
