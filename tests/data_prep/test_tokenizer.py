"""Every text has tokens, and they turn back into it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizers.tokenizer import ByteTokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_bytes_turn_back_into_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([text])
    assert list(tokens) == list(text.encode())
    assert tokenizer.decode(np.append(tokens, tokenizer.end_of_document)) == text


def test_the_end_of_a_document_is_the_one_id_that_no_byte_has() -> None:
    assert (ByteTokenizer.end_of_document, ByteTokenizer.vocab_size) == (256, 257)
