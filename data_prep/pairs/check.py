"""Whether pairs can be used: for a run, or all of them in full."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from conf.schema.model import Model
from data_prep.errors import DataPrepError
from data_prep.files.hashes import require_unchanged
from data_prep.indexed import unknown
from data_prep.indexed.check import check, highest_id
from data_prep.kinds import read_described
from data_prep.pairs.lines import lines
from data_prep.pairs.manifest import PairsManifest
from data_prep.pairs.pair import SIDES, SPLITS
from data_prep.tokenizers.vocabulary import warn
from megatron_ext.contract.errors import DataError
from megatron_ext.data import pairs
from megatron_ext.data.indexed_dataset import data_file


def check_pairs(model: Model, prefix: Path) -> list[str]:
    """Checks that pairs can feed a model; returns what is odd about that, in words.

    Raises:
        DataPrepError: they are missing, damaged, of a larger vocabulary, or all too long.
    """
    given = f"data.prefix={prefix}"
    for side in SIDES:
        if not (path := data_file(pairs.side_prefix(prefix, "train", side), ".idx")).is_file():
            raise DataPrepError(
                f"{given}: {path} is not there; model.family={model.family} learns from pairs of sentences: prepare "
                "them with 'tdpp data pairs', and give the prefix that it prints"
            )
    try:
        found = pairs.Pairs(prefix, "train", model.sequence_length, model.sized(1).decoder_tokens)
    except DataError as error:
        raise DataPrepError(f"{given}: {error}") from error
    needed = 1 + max(highest_id(found.source), highest_id(found.target))
    if needed > model.vocab_size:
        raise DataPrepError(
            f"{given} has token ids up to {needed - 1}, but model.vocab_size={model.vocab_size}; set it to that of the "
            "data's tokenizer, or choose other data"
        )
    sides = zip(SIDES, (found.source, found.target), strict=True)
    lacking = [unknown.doubt(data, prefix, f"{given}: {side} of train", in_full=False) for side, data in sides]
    doubts = list(filter(None, lacking))
    if 2 * found.left_out < len(found.source):
        return doubts
    return [
        *doubts,
        f"{given}: only {len(found.kept)} of {len(found.source)} pairs are used; the others are longer than "
        f"model.sequence_length={model.sequence_length} or model.decoder_sequence_length="
        f"{model.sized(1).decoder_tokens} with their marks, or empty",
    ]


def check_in_full(prefix: Path, vocab_size: int | None) -> PairsManifest:
    """Checks hashes, token ids, and that sentence lies beside sentence; warns on stderr of many unknown tokens.

    Args:
        prefix: of the data.
        vocab_size: ids must be below it; None takes the manifest's.

    Raises:
        DataPrepError: they cannot be used.
    """
    manifest = read_described(prefix, PairsManifest)
    require_unchanged(manifest.sha256, prefix)
    for split, side in product(SPLITS, SIDES):
        part = pairs.side_prefix(prefix, split, side)
        data = check(part, vocab_size or manifest.vocab_size)
        warn(unknown.doubt(data, prefix, str(part), in_full=True))
        sentences = len(data)
        texts = sum(1 for _ in lines(data_file(part, ".txt")))
        if not sentences == texts == manifest.splits[split].pairs:
            raise DataPrepError(
                f"{part}: {sentences} sentences in tokens and {texts} as text, but {prefix}.json has "
                f"{manifest.splits[split].pairs} pairs; prepare the data again"
            )
    return manifest
