"""The plain tokenizer does what the package does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizers.special import finished_words, train_both
from megatron_ext.contract.errors import EngineError
from megatron_ext.inference.text import tokenizer_of

SENTENCES = [
    "Die Schaltfläche öffnet ein Menü, das weitere 12 Befehle enthält.",
    "It's the user's choice: we'll open 'Extras' - Options…",
    "Größe (in cm²)  und   Höhe",
    "naïve café № 5 ½ ١٢٣ 漢字 नमस्ते 👍🏽",
] * 3
CONTENT = train_both(SENTENCES, 400).content


@given(st.one_of(st.text(max_size=40), st.text("ab '12s.t\u0301ö\n\t \u00a0²½", max_size=30)))
def test_ids_are_those_of_the_package(text: str) -> None:
    plain, package = tokenizer_of(CONTENT, plain=True), tokenizer_of(CONTENT)
    assert plain.encode(text) == package.encode(text)


@given(st.lists(st.integers(0, 399), max_size=30))
def test_text_is_that_of_the_package(ids: list[int]) -> None:
    plain, package = tokenizer_of(CONTENT, plain=True), tokenizer_of(CONTENT)
    assert plain.decode(ids) == package.decode(ids)


@pytest.mark.parametrize("text", SENTENCES[:4])
def test_sentences_come_back(text: str) -> None:
    plain = tokenizer_of(CONTENT, plain=True)
    assert plain.decode(plain.encode(text)) == text


def test_another_kind_needs_the_package() -> None:
    with pytest.raises(EngineError, match="only byte-level BPEs can be used without the Python package tokenizers"):
        tokenizer_of(finished_words(["a", "b"]).content, plain=True)


@pytest.mark.parametrize("content", ["{", json.dumps({"model": {"type": "BPE"}})], ids=["no-json", "no-vocabulary"])
def test_what_is_no_tokenizer_is_one_message(content: str) -> None:
    with pytest.raises(EngineError):
        tokenizer_of(content)
