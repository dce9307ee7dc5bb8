"""A byte-level BPE from its tokenizer.json, in plain Python: for machines that have no `tokenizers`.

It is as slow as it is short: some thousand words a second.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any, Dict, Iterator, List, Mapping

from megatron_ext.contract.errors import EngineError

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
"""Words of their own, as in GPT-2."""


class ByteBpe:
    """Encodes and decodes as the file says, if it is of this kind.

    Raises:
        EngineError: it is of another kind.
    """

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
