"""From text to token ids and back, by the tokenizer.json that lies beside pairs."""

from __future__ import annotations

import json
from typing import List, Protocol

from megatron_ext.contract.errors import EngineError
from megatron_ext.inference.byte_bpe import ByteBpe


class TextTokenizer(Protocol):
    """Of both languages."""

    def encode(self, text: str) -> List[int]:
        """Token ids, without marks."""
        ...

    def decode(self, ids: List[int]) -> str:
        """The text, without special tokens."""
        ...


def tokenizer_of(content: str, plain: bool = False) -> TextTokenizer:
    """That of a tokenizer.json: the package's own where it is installed and not `plain`.

    Raises:
        EngineError: the content cannot be used.
    """
    try:
        if not plain:
            try:
                return _Library(content)
            except ImportError:
                pass
        return ByteBpe(json.loads(content))
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"the tokenizer cannot be read: {error}") from error


class _Library:
    def __init__(self, content: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(content)
        self._tokenizer.encode_special_tokens = True  # what looks like one in a text is text

    def encode(self, text: str) -> List[int]:
        ids: List[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: List[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text
