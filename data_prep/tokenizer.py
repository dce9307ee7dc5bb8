"""Tokenisers: text to token ids and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """What preparing data asks of a tokeniser. The name and the sizes go into the data's manifest."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.int64]: ...

    def decode(self, tokens: NDArray[np.integer]) -> str: ...


class ByteTokenizer:
    """The bytes of UTF-8, ids 0 to 255, and one id more for the end of a document. It needs no files."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        """[bytes]: the ids of `text`, without an end of document."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """The text of ids, ends of documents left out; bytes that are no UTF-8 are shown as U+FFFD."""
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")


TOKENIZERS: dict[str, Tokenizer] = {tokenizer.name: tokenizer for tokenizer in (ByteTokenizer(),)}
"""By the name that a manifest has."""
