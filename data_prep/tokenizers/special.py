"""The special tokens that BERT's and T5's data need, and what the ranks are to know of a tokenizer."""

from __future__ import annotations

import json
from typing import Any

from data_prep.tokenizers.tokenizer import JsonTokenizer, loaded
from megatron_ext.data.masked.vocabulary import Vocabulary

NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("[BOS]", "<s>"),
    "eos": ("[EOS]", "</s>"),
}
"""What tokenizers call them; one that has none of a kind is given the first."""
SEPARATOR = NAMES["sep"][0]
SENTINEL = "<extra_id_{}>"
AT_FIRST = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Begin a vocabulary that is learned, as BERT's does."""
AT_LAST = ("[BOS]", "[EOS]")
"""Follow it, before the sentinels, as in Megatron."""


def with_special(content: str, sentinels: int) -> JsonTokenizer:
    """The tokenizer of a tokenizer.json with all special tokens, and so many sentinels at least.

    Raises:
        DataPrepError: it is none.
    """
    tokenizer = loaded(content)
    there = tokenizer.get_vocab()
    missing = [names[0] for names in NAMES.values() if not any(name in there for name in names)]
    wanted = [SENTINEL.format(number) for number in range(sentinels)]
    tokenizer.add_special_tokens(missing + [name for name in wanted if name not in there])
    separator = next(name for name in NAMES["sep"] if tokenizer.token_to_id(name) is not None)
    return JsonTokenizer(tokenizer.to_str(), separator)


def vocabulary_of(tokenizer: JsonTokenizer) -> Vocabulary:
    """What samples of masked text need to know of a tokenizer."""
    ids = loaded(tokenizer.content).get_vocab()
    named = {kind: next((ids[name] for name in names if name in ids), None) for kind, names in NAMES.items()}
    sentinels: list[int] = []
    while (token := ids.get(SENTINEL.format(len(sentinels)))) is not None:
        sentinels.append(token)
    return Vocabulary(
        size=tokenizer.vocab_size, **named, sentinels=sentinels, continues=_continues(tokenizer.content, ids)
    )


def _continues(content: str, ids: dict[str, int]) -> list[int]:
    """WordPiece marks the tokens that go on with a word; others mark those that follow a space."""
    settings: dict[str, Any] = json.loads(content)
    special = {token["id"] for token in settings.get("added_tokens", [])}
    prefix = settings["model"].get("continuing_subword_prefix")
    if settings["model"]["type"] == "WordPiece" or prefix:
        found = [number for token, number in ids.items() if token.startswith(prefix or "##")]
    else:
        found = [number for token, number in ids.items() if token[:1].isalnum() and token[0] not in "ĠĊĉč"]
    return sorted(set(found) - special)
