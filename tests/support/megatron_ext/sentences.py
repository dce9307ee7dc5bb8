"""Random data of sentences, with the description of a vocabulary beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_ext.data.indexed_dataset import data_file, indexed_writer
from megatron_ext.data.masked.vocabulary import VOCABULARY, Vocabulary

SENTINELS = 20


def write_sentences(
    prefix: Path, seed: int, vocab_size: int = 120, documents: int = 12, longest: int = 20, text: range | None = None
) -> Vocabulary:
    """Documents of no to eight sentences, sentences of no to `longest` tokens, a quarter of which go on with a word.

    Its ids are those of `text`, or any, also special ones, which are the text's own then.
    """
    text = range(vocab_size) if text is None else text
    random = np.random.default_rng(seed)
    boundaries = np.concatenate([[0, 8], 8 + np.cumsum(random.integers(0, 9, documents - 1))])
    continues = np.sort(random.choice(np.arange(6, vocab_size), vocab_size // 4, replace=False)).tolist()
    sentinels = list(range(vocab_size - SENTINELS, vocab_size))
    with indexed_writer(prefix, np.dtype("<u2"), boundaries) as writer:
        for _ in range(int(boundaries[-1])):
            writer.add(random.integers(text.start, text.stop, random.integers(0, longest + 1)))
    vocabulary = Vocabulary(vocab_size, 1, 2, 3, 0, 4, 5, sentinels, continues)
    data_file(prefix, VOCABULARY).write_text(vocabulary.to_json())
    return vocabulary
