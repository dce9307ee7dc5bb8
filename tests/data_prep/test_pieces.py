"""Long texts are tokenised in pieces, whose tokens are those of the whole text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data_prep.tokenizers import pieces
from data_prep.tokenizers.tokenizer import JsonTokenizer, train_bpe

MARKS = st.sampled_from(
    ["\n", "\n\n", "\r\n", " ", "  ", "\t", "\u180e", "\u2028", "\x1f", "'s", "a", "12", ".", "é", "。"]
)


@cache
def trained() -> JsonTokenizer:
    return train_bpe(["it's 12 words.\n\n  and\n\tmore\r\nof them, and them " * 9], 320)


@cache
def library() -> Tokenizer:
    return Tokenizer.from_str(trained().content)


@settings(deadline=None, max_examples=400)
@given(st.lists(MARKS, max_size=40).map("".join))
def test_pieces_have_the_tokens_of_the_whole(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 2)
        found = list(pieces.pieces(text))
    assert "".join(found) == text
    assert [token for piece in found for token in library().encode(piece).ids] == library().encode(text).ids


def test_a_long_text_is_never_given_to_the_library_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    line, text = "a line of some words\n", "a line of some words\n" * 40_000
    assert max(map(len, pieces.pieces(text))) <= pieces.PIECE + len(line)
    given: list[int] = []
    ids = JsonTokenizer._ids
    monkeypatch.setattr(
        JsonTokenizer, "_ids", lambda self, texts: given.append(sum(map(len, texts))) or ids(self, texts)
    )
    encoded, short = trained().encode([text, "short"])
    assert list(encoded) == library().encode(text).ids
    assert list(short) == library().encode("short").ids
    assert max(given) <= pieces.PIECE + len(line)


def changed(**parts: Any) -> str:
    return json.dumps(json.loads(trained().content) | parts)


OWN = {"id": 320, "content": "\n\n", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    ("content", "may"),
    [
        pytest.param(lambda: trained().content, True, id="gpt2-form"),
        pytest.param(lambda: changed(normalizer={"type": "NFC"}), False, id="normalizer"),
        pytest.param(lambda: changed(pre_tokenizer=None), False, id="no-words"),
        pytest.param(lambda: changed(pre_tokenizer={"type": "Whitespace"}), False, id="other-words"),
        pytest.param(
            lambda: changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}),
            False,
            id="space-before-each-text",
        ),
        pytest.param(lambda: changed(added_tokens=[OWN | {"special": False}]), False, id="token-of-lines"),
    ],
)
def test_only_tokenizers_of_gpt2s_form_are_given_pieces(content: Any, may: bool) -> None:
    assert pieces.may_be_cut(content()) is may
