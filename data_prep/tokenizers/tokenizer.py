"""Tokenisers: text to token ids and back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError, missing_package, named
from data_prep.tokenizers.pieces import PIECE, may_be_cut, pieces
from data_prep.tokenizers.vocabulary import words_of
from megatron_ext.contract.files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end of a document."""
SMALLEST_BPE = 257
"""Ids of a byte-level BPE without any merge: the bytes and the end of a document."""
SMALLEST_WORDPIECE = 64
"""With fewer ids than that, letters alone would take them all."""
MOST_UNUSED = 1000
"""Ids without a word, as some tokenizers keep for later."""
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

    def prompt(self, text: str) -> list[int]:
        """The ids of what is written for a model to continue: special tokens in it are tokens."""
        ...

    def decode(self, tokens: NDArray[np.integer], whole: bool = False) -> str:
        """The text of ids, without ends of documents unless `whole`; bytes that are no UTF-8 are shown as U+FFFD."""
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

    def prompt(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, tokens: NDArray[np.integer], whole: bool = False) -> str:
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokeniser of the `tokenizers` library, from the content of its tokenizer.json.

    Texts are tokenised as they are: what looks like a special token in them is text, and none is added. In a prompt it
    is one.

    Raises:
        DataPrepError: when made: the content is not a tokeniser, or has no such end of a document.
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
        """GPT-2's form: vocab.json and merges.txt. Raises DataPrepError: they cannot be read, or do not belong
        together."""
        return cls._named(vocab, content_of_files(vocab, merges), end_token)

    @classmethod
    def from_file(cls, path: Path, end_token: str = END_OF_TEXT) -> JsonTokenizer:
        """What `content_of` reads. Raises DataPrepError: it cannot be read or used."""
        return cls._named(_main_file(path), content_of(path), end_token)

    @classmethod
    def _named(cls, path: Path, content: str, end_token: str) -> JsonTokenizer:
        with named(str(path)):
            made = cls(content, end_token)
            made._require_ids()
        return made

    def _require_ids(self) -> None:
        """Raises DataPrepError for a vocabulary whose numbers are no ids, or in which text gets lost."""
        settings, words = json.loads(self.content), self._tokenizer.get_vocab()
        if self.vocab_size > 2 * len(words) + MOST_UNUSED:
            word = max(words, key=words.__getitem__)
            raise DataPrepError(
                f"{word!r} has the id {words[word]}, but the vocabulary has {len(words)} words; give a file with ids, "
                "0 and on, not with counts"
            )
        model, bytes_first = settings["model"], (settings.get("pre_tokenizer") or {}).get("type") == "ByteLevel"
        if bytes_first and model["type"] == "BPE" and model.get("unk_token") is None:
            from tokenizers.pre_tokenizers import ByteLevel

            missing = sorted(set(ByteLevel.alphabet()) - words.keys())
            if missing:
                raise DataPrepError(
                    f"the vocabulary lacks {len(missing)} of the 256 bytes, such as {missing[0]!r}; text with them "
                    "would vanish: give the whole file"
                )

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

    def prompt(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._ids([text])[0])
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        if not self._may_be_cut or all(len(text) <= PIECE for text in texts):
            return self._ids(texts)
        return [
            np.concatenate([np.array(self._ids([piece])[0], np.uint32) for piece in pieces(text)]) for text in texts
        ]

    def decode(self, tokens: NDArray[np.integer], whole: bool = False) -> str:
        kept = tokens if whole else tokens[tokens != self.end_of_document]
        return self._tokenizer.decode(kept.tolist(), skip_special_tokens=False)

    def text_of(self, tokens: Sequence[str]) -> str:
        """The text of tokens that need not be in the vocabulary."""
        decoder = self._tokenizer.decoder
        assert decoder is not None
        return str(decoder.decode(list(tokens)))

    def _ids(self, texts: Sequence[str]) -> list[Sequence[int] | NDArray[np.integer]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _may_be_cut(self) -> bool:
        return may_be_cut(self.content)

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        tokenizer = loaded(self.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __getstate__(self) -> dict[str, str]:
        return {"content": self.content, "end_token": self.end_token}


def content_of(path: Path) -> str:
    """A tokenizer.json, or what is made of BERT's vocab.txt or of a folder with vocab.json and merges.txt. Raises
    DataPrepError: it cannot be read or used."""
    file = _main_file(path)
    if path.is_dir() and file.name == "vocab.json":
        return content_of_files(file, path / "merges.txt")
    return _bert(file, _read(file)) if file.suffix == ".txt" else _read(file)


def end_token_of(path: Path) -> str:
    """The end of a document of a tokenizer that people give: `<|endoftext|>` if it has one, else the token that the
    `tokenizer_config.json` beside it calls the end of a text.

    Raises:
        DataPrepError: the tokenizer cannot be read or used.
    """
    if loaded(content_of(path)).token_to_id(END_OF_TEXT) is not None:
        return END_OF_TEXT
    return eos_token_of(path) or END_OF_TEXT


def eos_token_of(path: Path) -> str | None:
    """The token that the `tokenizer_config.json` beside a tokenizer calls the end of a text; None where none does.
    Raises DataPrepError: the folder has no tokenizer."""
    try:
        content = json.loads(read_regular(_main_file(path).with_name("tokenizer_config.json")))
        found = content.get("eos_token")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    if isinstance(found, dict):  # as it was saved before transformers 5
        found = found.get("content")
    return found if isinstance(found, str) else None


def _main_file(path: Path) -> Path:
    """The file itself, or that of a folder which says what the tokens are."""
    if not path.is_dir():
        return path
    if (path / "tokenizer.json").exists():
        return path / "tokenizer.json"
    if (path / "vocab.json").exists():
        return path / "vocab.json"
    if (slow := next(iter(sorted(path.glob("*.model"))), None)) is not None:
        raise DataPrepError(
            f"{path} has {slow.name} but no tokenizer.json, which tdpp reads; transformers makes one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return path / "tokenizer.json"


def content_of_files(vocab: Path, merges: Path) -> str:
    """The tokenizer.json of GPT-2's two files. Raises DataPrepError: they cannot be read, or do not belong together."""
    library()
    from tokenizers.models import BPE

    for path in (vocab, merges):
        _read(path)  # says what is wrong with a file better than the library
    try:
        model = BPE.from_file(str(vocab), str(merges))
    except Exception as error:
        raise DataPrepError(f"{vocab}, {merges}: not a vocabulary and merges of GPT-2's form ({error})") from error
    return _byte_level(model).to_str()


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> JsonTokenizer:
    """A byte-level BPE as GPT-2's, of at most `vocab_size` ids (`SMALLEST_BPE` or more), learned from `texts`.

    It begins with the `special` tokens.
    """
    library()
    from tokenizers.models import BPE

    found = (piece for text in texts for piece in pieces(text))
    return JsonTokenizer(learned(_byte_level(BPE()), found, vocab_size, [*special, END_OF_TEXT]))


def learned(tokenizer: HfTokenizer, texts: Iterable[str], vocab_size: int, special: list[str]) -> str:
    """The tokenizer.json of a tokeniser of bytes, which has learned its merges from the texts."""
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def train_wordpiece(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> JsonTokenizer:
    """A WordPiece vocabulary as BERT's, in lower case, of at most `vocab_size` ids, the `special` ones first."""
    library()
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = _wordpiece({}, lowercase=True)
    trainer = WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return JsonTokenizer(tokenizer.to_str(), "[SEP]")


def _wordpiece(vocabulary: dict[str, int], lowercase: bool) -> HfTokenizer:
    """BERT's tokeniser around a vocabulary."""
    from tokenizers import decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    tokenizer = library()(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _bert(path: Path, content: str) -> str:
    """The tokenizer.json of BERT's vocab.txt, a token a line; one without capital letters is for lower case."""
    tokens = words_of(content.split("\n"), path)
    special = [token for token in tokens if token.startswith("[") and token.endswith("]")]
    missing = {"[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"} - set(special)
    if missing:
        raise DataPrepError(f"{path}: not a vocabulary of BERT's form: it has no {', '.join(sorted(missing))}")
    lowercase = not any(token != token.lower() for token in set(tokens) - set(special))
    tokenizer = _wordpiece({token: number for number, token in enumerate(tokens)}, lowercase)
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str()


def _byte_level(model: Any) -> HfTokenizer:
    """GPT-2's tokeniser around its model."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer = library()(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def loaded(content: str) -> HfTokenizer:
    """A tokenizer.json. Raises DataPrepError: it is none."""
    tokenizers = library()
    try:
        return tokenizers.from_str(content)
    except Exception as error:
        raise DataPrepError(f"not a tokenizer of the tokenizers library ({error})") from error


def library() -> type[HfTokenizer]:
    """One thread to a process: several processes share the work."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise missing_package("tokenizers", "for all tokens but bytes") from error
    return Tokenizer


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise DataPrepError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataPrepError(f"{path}: not UTF-8, so it is not a tokenizer") from error
