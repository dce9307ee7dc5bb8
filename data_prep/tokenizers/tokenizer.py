"""Tokenisers: text to token ids and back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError, missing_package
from data_prep.tokenizers.pieces import PIECE, may_be_cut, pieces
from megatron_ext.contract.files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end of a document."""
SMALLEST_BPE = 257
"""Ids of a byte-level BPE without any merge: the bytes and the end of a document."""
LARGEST_BPE = 2**20
"""Several times the largest in use; learning takes memory for each id before the first one is found."""


class Tokenizer(Protocol):
    """What preparing data asks of a tokeniser; it goes to other processes by pickle."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def content(self) -> str | None:
        """What `<prefix>.tokenizer.json` is to hold, so that the tokens can be turned back into text."""
        ...

    @property
    def identity(self) -> str:
        """Tokenisers of the same identity give the same tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        """The ids of each text, without an end of document."""
        ...

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """The text of ids, ends of documents left out; bytes that are no UTF-8 are shown as U+FFFD."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8, ids 0 to 255, and one id more for the end of a document. It needs no files."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256
    content = None
    identity = "byte"

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: NDArray[np.integer]) -> str:
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokeniser of the `tokenizers` library, from the content of its tokenizer.json.

    Texts are tokenised as they are: what looks like a special token in them is text, and none is added.

    Raises:
        DataPrepError: when made: the content is no tokeniser, or has no such end of a document.
    """

    content: str
    end_token: str = END_OF_TEXT

    def __post_init__(self) -> None:
        if self._tokenizer.token_to_id(self.end_token) is None:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
            raise DataPrepError(
                f"the tokenizer has no token {self.end_token!r} for the end of a document; choose one with "
                f"--end-of-document; its special tokens are {', '.join(special) or 'none'}"
            )

    @classmethod
    def from_files(cls, vocab: Path, merges: Path, end_token: str = END_OF_TEXT) -> JsonTokenizer:
        """GPT-2's form: vocab.json and merges.txt.

        Raises:
            DataPrepError: they cannot be read, or do not belong together.
        """
        _library()
        from tokenizers.models import BPE

        for path in (vocab, merges):
            _read(path)  # says what is wrong with a file better than the library
        try:
            model = BPE.from_file(str(vocab), str(merges))
        except Exception as error:
            raise DataPrepError(f"{vocab}, {merges}: not a vocabulary and merges of GPT-2's form ({error})") from error
        content = _byte_level(model).to_str()
        try:
            return cls(content, end_token)
        except DataPrepError as error:
            raise DataPrepError(f"{vocab}: {error}") from error

    @classmethod
    def from_file(cls, path: Path, end_token: str = END_OF_TEXT) -> JsonTokenizer:
        """A tokenizer.json, or a folder with one or with vocab.json and merges.txt.

        Raises:
            DataPrepError: it cannot be read or used.
        """
        if path.is_dir():
            if not (path / "tokenizer.json").exists() and (path / "vocab.json").exists():
                return cls.from_files(path / "vocab.json", path / "merges.txt", end_token)
            path /= "tokenizer.json"
        content = _read(path)
        try:
            return cls(content, end_token)
        except DataPrepError as error:
            raise DataPrepError(f"{path}: {error}") from error

    @property
    def name(self) -> str:
        """What kind it is: BPE, Unigram, WordPiece or WordLevel."""
        return type(self._tokenizer.model).__name__

    @cached_property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def end_of_document(self) -> int:
        found = self._tokenizer.token_to_id(self.end_token)
        assert found is not None
        return found

    @property
    def identity(self) -> str:
        return f"{hashlib.sha256(self.content.encode()).hexdigest()} {self.end_token}"

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        if not self._may_be_cut or all(len(text) <= PIECE for text in texts):
            return self._ids(texts)
        return [
            np.concatenate([np.array(self._ids([piece])[0], np.uint32) for piece in pieces(text)]) for text in texts
        ]

    def decode(self, tokens: NDArray[np.integer]) -> str:
        return self._tokenizer.decode(tokens[tokens != self.end_of_document].tolist(), skip_special_tokens=False)

    def _ids(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _may_be_cut(self) -> bool:
        return may_be_cut(self.content)

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        hf = _library()
        try:
            tokenizer = hf.from_str(self.content)
        except Exception as error:
            raise DataPrepError(f"not a tokenizer of the tokenizers library ({error})") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __getstate__(self) -> dict[str, str]:
        return {"content": self.content, "end_token": self.end_token}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """A byte-level BPE as GPT-2's, of at most `vocab_size` ids (`SMALLEST_BPE` or more), learned from `texts`."""
    _library()
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = _byte_level(BPE())
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return JsonTokenizer(tokenizer.to_str())


def _byte_level(model: Any) -> HfTokenizer:
    """GPT-2's tokeniser around its model."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer = _library()(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _library() -> type[HfTokenizer]:
    """One thread to a process: several processes share the work."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise missing_package("tokenizers", "for all tokens but bytes") from error
    return Tokenizer


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise DataPrepError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataPrepError(f"{path}: not UTF-8, so it is no tokenizer") from error
