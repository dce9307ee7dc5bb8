"""From text to token ids and back, by the tokenizer.json that lies beside pairs."""

from __future__ import annotations

import json
import unicodedata
from contextlib import suppress
from functools import lru_cache
from typing import Any, Dict, Iterator, List, Mapping, Optional, Protocol

from megatron_ext.contract.errors import EngineError
from megatron_ext.data.pairs import FEW_UNKNOWN, MOST_UNKNOWN, UNKNOWN

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
"""Words of their own, as in GPT-2."""


class ByteBpe:
    """Encodes and decodes as the file says, if it is of this kind. Raises EngineError: it is of another kind."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        model, before = content.get("model") or {}, content.get("pre_tokenizer") or {}
        if model.get("type") != "BPE" or before.get("type") != "ByteLevel" or content.get("normalizer") is not None:
            raise EngineError("only byte-level BPEs can be used without the Python package tokenizers; install that")
        self._prefix = " " if before.get("add_prefix_space") else ""
        self._whole = not before.get("use_regex", True)
        self._vocabulary: Dict[str, int] = model["vocab"]
        self._words = {number: token for token, number in self._vocabulary.items()}
        self._special = {one["id"] for one in content.get("added_tokens", ()) if one.get("special")}
        pairs = (tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"])
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self._letters = _letters_of_bytes()
        self._bytes = {letter: byte for byte, letter in enumerate(self._letters)}
        self._of_word = lru_cache(maxsize=1 << 16)(self._merged)

    def encode(self, text: str) -> List[int]:
        """Token ids, without marks."""
        if self._prefix and text and text[0] != " ":
            text = self._prefix + text
        return [number for word in ([text] if self._whole else words(text)) for number in self._of_word(word)]

    def decode(self, ids: List[int]) -> str:
        """The text of token ids; special tokens are left out, and bytes that are no UTF-8 replaced."""
        letters = "".join(self._words.get(number, "") for number in ids if number not in self._special)
        text = bytes(self._bytes[letter] for letter in letters if letter in self._bytes).decode("utf-8", "replace")
        return text[1:] if self._prefix and text.startswith(" ") else text

    def _merged(self, word: str) -> List[int]:
        parts = [self._letters[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            pairs = [(parts[place], parts[place + 1]) for place in range(len(parts) - 1)]
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            joined, place = [], 0
            while place < len(parts):
                if tuple(parts[place : place + 2]) == best:
                    joined.append("".join(best))
                    place += 2
                else:
                    joined.append(parts[place])
                    place += 1
            parts = joined
        return [self._vocabulary[part] for part in parts]


def words(text: str) -> Iterator[str]:
    """What GPT-2's pattern finds: contractions; letters, digits or other signs with a space before them; spaces.

    Of several spaces the last belongs to what follows.
    """
    place = 0
    while place < len(text):
        contraction = next((one for one in CONTRACTIONS if text.startswith(one, place)), None)
        if contraction is not None:
            yield contraction
            place += len(contraction)
            continue
        first = place + (text[place] == " " and place + 1 < len(text) and not text[place + 1].isspace())
        kind, end = _kind(text[first]), first + 1
        while end < len(text) and _kind(text[end]) == kind:
            end += 1
        if kind == "space" and end < len(text) and end - first > 1:
            end -= 1
        yield text[place:end]
        place = end


@lru_cache(maxsize=1 << 12)
def _kind(sign: str) -> str:
    if sign.isspace() and sign not in "\x1c\x1d\x1e\x1f":  # which Unicode does not count as white space
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(sign)[0], "other")


def _letters_of_bytes() -> List[str]:
    """The visible letter that stands for each byte, as in GPT-2."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


class TextTokenizer(Protocol):
    """What the tokenizers of both languages have in common."""

    def encode(self, text: str) -> List[int]:
        """Token ids, without marks."""

    def decode(self, ids: List[int]) -> str:
        """The text, without special tokens."""


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
        """What to say of the text so far; None where the vocabulary knows nearly all. Raises EngineError: it knows
        nearly nothing."""
        share = self.unknown / max(self.tokens, 1)
        said = "{} of {} tokens of the text ({:.3g}%) are not in the model's vocabulary".format(
            self.unknown, self.tokens, 100 * share
        )
        if share > MOST_UNKNOWN:
            raise EngineError(said + "; give text in the language, and the form, that the model was trained on")
        return said if share > FEW_UNKNOWN else None


def tokenizer_of(content: str, plain: bool = False) -> TextTokenizer:
    """Reads a tokenizer.json: gives the package's own where it is installed and not `plain`. Raises EngineError: the
    content cannot be used."""
    try:
        with suppress(ImportError):
            if not plain:
                return _Library(content)
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
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: List[int]) -> str:
        return self._tokenizer.decode(ids)
