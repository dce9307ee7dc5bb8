"""The special tokens that BERT's and T5's data need, and what the ranks are to know of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_prep.errors import DataPrepError
from data_prep.tokenizers.tokenizer import JsonTokenizer, learned, library, loaded
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
    """The tokenizer of a tokenizer.json with all special tokens, and so many sentinels at least. Raises DataPrepError:
    it is none."""
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


SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
"""Ids 0 to 3: padding, unknown words, begin and end of a sentence."""
SMALLEST = len(SPECIAL) + 256
"""Ids of a byte-level BPE without any merge."""
CONTINUES = "@@"
"""At the end of a token of subword-nmt's: the word goes on."""
_MOSES = (
    # what Moses' tokenizer escapes, and the spaces that it puts around punctuation
    *((r"&#124;", "|"), (r"&#91;", "["), (r"&#93;", "]"), (r"&lt;", "<"), (r"&gt;", ">"), (r" @-@ ", "-")),
    *((r" &apos;(?=(?:s|S|m|M|re|ve|ll|d)\b)", "'"), (r" &apos;t\b", "'t"), (r"&apos;", "'")),
    *((r"(?<=[(\[{¿¡]) ", ""), (r" (?=[.,;:!?%)\]}…])", "")),
    *((r"&quot; (?=[^&]*&quot;)", '"'), (r" &quot;", '"'), (r"&quot;", '"'), (r"&amp;", "&")),
)
"""Patterns, and what takes their place, in this order."""


def train_both(sentences: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """A byte-level BPE of at most `vocab_size` ids (`SMALLEST` or more), learned from the sentences.

    A sentence begins as if after a space, so that a word is the same tokens everywhere; decoding takes the space away.
    """
    made = library()
    from tokenizers.decoders import ByteLevel as ToText
    from tokenizers.decoders import Sequence as Chain
    from tokenizers.decoders import Strip
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = made(BPE(unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.decoder = Chain([ToText(), Strip(" ", 1, 0)])
    return JsonTokenizer(learned(tokenizer, sentences, vocab_size, [*SPECIAL]), SPECIAL[3])


def given_for_both(path: Path) -> JsonTokenizer:
    """The tokenizer of other pairs. Raises DataPrepError: it cannot be used, or has other special tokens."""
    tokenizer = JsonTokenizer.from_file(path, SPECIAL[3])
    ids = loaded(tokenizer.content).get_vocab()
    for number, token in enumerate(SPECIAL):
        if ids.get(token) != number:
            raise DataPrepError(
                f"{path}: {token} has the id {ids.get(token, 'none')}, but pairs need {', '.join(SPECIAL)} "
                "as ids 0 to 3; give the .tokenizer.json of other pairs, or learn one with --train-bpe"
            )
    return tokenizer


def finished_words(tokens: Sequence[str]) -> JsonTokenizer:
    """Returns a tokenizer of text that subword-nmt and Moses have cut into tokens; ids 4 and on are its vocabulary's.

    Words are what stands between spaces. Decoding joins the parts of words and undoes Moses' tokenizer.
    """
    made = library()
    from tokenizers import Regex, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    ids = {token: number for number, token in enumerate(tokens, len(SPECIAL))}
    ids |= {token: number for number, token in enumerate(SPECIAL)}  # a file that has them, too, gives no second id
    tokenizer = made(WordLevel(ids, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("$"), " "),
            decoders.Fuse(),
            decoders.Replace(f"{CONTINUES} ", ""),
            decoders.Replace(Regex(r"\s+$"), ""),
            *(decoders.Replace(Regex(pattern), text) for pattern, text in _MOSES),
        ]
    )
    return JsonTokenizer(tokenizer.to_str(), SPECIAL[3])
