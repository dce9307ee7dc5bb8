"""From text to token ids and back, by the tokenizer.json that lies beside pairs."""

from __future__ import annotations

import json
from typing import List, Optional, Protocol

from megatron_ext.contract.errors import EngineError
from megatron_ext.data.pairs import FEW_UNKNOWN, MOST_UNKNOWN, UNKNOWN
from megatron_ext.inference.byte_bpe import ByteBpe


class TextTokenizer(Protocol):
    """Of both languages."""

    def encode(self, text: str) -> List[int]:
        """Token ids, without marks."""
        ...

    def decode(self, ids: List[int]) -> str:
        """The text, without special tokens."""
        ...


class Counting:
    """A tokenizer that counts what its vocabulary lacks."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0
        self.unknown = 0

    def encode(self, text: str) -> List[int]:
        ids = self._tokenizer.encode(text)
        self.tokens += len(ids)
        self.unknown += ids.count(UNKNOWN)
        return ids

    def decode(self, ids: List[int]) -> str:
        return self._tokenizer.decode(ids)

    def doubt(self) -> Optional[str]:
        """What to say of the text so far; None where the vocabulary knows nearly all.

        Raises:
            EngineError: it knows nearly nothing.
        """
        share = self.unknown / max(self.tokens, 1)
        said = "{} of {} tokens of the text ({:.3g}%) are not in the model's vocabulary".format(
            self.unknown, self.tokens, 100 * share
        )
        if share > MOST_UNKNOWN:
            raise EngineError(said + "; give text in the language, and the form, that the model was trained on")
        return said if share > FEW_UNKNOWN else None


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
