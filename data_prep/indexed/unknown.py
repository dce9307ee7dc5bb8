"""How many tokens of indexed data stand for what the vocabulary lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.indexed.manifest import TOKENIZER
from data_prep.tokenizers import vocabulary
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file

BLOCK = 1 << 24
"""Tokens that are looked at once."""
SAMPLED = (64, 1 << 16)
"""Places that a launch looks at, and the tokens of each."""
WAY_OUT = "prepare the data again, with the vocabulary of this text"


def doubt(data: IndexedDataset, prefix: Path, given: str, *, in_full: bool) -> str | None:
    """What to say of the unknown tokens of indexed data; None where there are few, or nobody knows.

    Args:
        data: tokens.
        prefix: whose tokenizer lies beside it.
        given: names the data.
        in_full: looks at all tokens, not only at some.

    Raises:
        DataPrepError: nearly all are unknown.
    """
    unknown = vocabulary.unknown_id_beside(data_file(prefix, TOKENIZER))
    if unknown is None:
        return None
    places, size = SAMPLED
    if in_full or len(data.tokens) <= places * size:
        begins, size = np.zeros(1, np.int64), len(data.tokens)
    else:
        begins = np.unique(np.linspace(0, len(data.tokens) - size, places, dtype=np.int64))
    blocks = [data.tokens[begin : begin + size] for begin in begins.tolist()]
    found = sum(count(block, unknown) for block in blocks)
    return vocabulary.doubt(found, sum(map(len, blocks)), given, WAY_OUT)


def count(tokens: NDArray[np.integer], unknown: int) -> int:
    """How many of the tokens have this id; the memory it takes does not grow with them."""
    return sum(int((tokens[at : at + BLOCK] == unknown).sum()) for at in range(0, len(tokens), BLOCK))
