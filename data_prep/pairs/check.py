"""Whether pairs can be used: for a run, or all of them in full."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path

from conf.schema.model import Model
from conf.visible import plural
from data_prep.errors import DataPrepError, named
from data_prep.indexed.check import check, highest_id
from data_prep.kinds import PairsManifest, read_described, read_unchanged, require_training_document
from data_prep.pairs.lines import lines
from data_prep.tokenizers.special import SPECIAL
from data_prep.tokenizers.tokenizer import JsonTokenizer
from data_prep.tokenizers.vocabulary import unknown_doubt, warn
from megatron_ext.contract.models.model import PAIRS
from megatron_ext.data import pairs
from megatron_ext.data.indexed_dataset import data_file
from megatron_ext.data.pairs import SIDES, PairSamples, side_prefix
from megatron_ext.data.samples import SPLITS, Split


def check_pairs(model: Model, prefix: Path) -> list[str]:
    """Checks that pairs can feed a model; returns what is odd about that, in words. Raises DataPrepError: they are
    missing, damaged, of a larger vocabulary, or all too long."""
    given = f"data.prefix={prefix}"
    for side in SIDES:
        if not (path := data_file(pairs.side_prefix(prefix, "train", side), ".idx")).is_file():
            raise DataPrepError(
                f"{given}: {path} is not there; model.family={model.family} learns from pairs of sentences: prepare "
                "them with 'tdpp data pairs', and give the prefix that it prints"
            )
    with named(given):
        found = pairs.Pairs(prefix, "train", model.sequence_length, model.sized(1).decoder_tokens)
    needed = 1 + max(highest_id(found.source), highest_id(found.target))
    if needed > model.vocab_size:
        raise DataPrepError(
            f"{given} has token ids up to {needed - 1}, but model.vocab_size={model.vocab_size}; set it to that of the "
            "data's tokenizer, or choose other data"
        )
    sides = zip(SIDES, (found.source, found.target), strict=True)
    lacking = [unknown_doubt(data, prefix, f"{given}: {side} of train", in_full=False) for side, data in sides]
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

    Ids must be below `vocab_size`, or that of the manifest.

    Raises:
        DataPrepError: they cannot be used.
    """
    manifest = read_unchanged(prefix, PairsManifest)
    for split, side in product(SPLITS, SIDES):
        part = pairs.side_prefix(prefix, split, side)
        data = check(part, vocab_size or manifest.vocab_size)
        warn(unknown_doubt(data, prefix, str(part), in_full=True))
        sentences = len(data)
        texts = sum(1 for _ in lines(data_file(part, ".txt")))
        if not sentences == texts == manifest.splits[split].pairs:
            raise DataPrepError(
                f"{part}: {sentences} sentences in tokens and {texts} as text, but {prefix}.json has "
                f"{manifest.splits[split].pairs} pairs; prepare the data again"
            )
    return manifest


def described(prefix: Path) -> dict[str, str]:
    """What the manifest says, for people."""
    manifest = read_described(prefix, PairsManifest)
    facts = {"kind": "pairs", "languages": f"{manifest.source} to {manifest.target}"}
    for name, split in manifest.splits.items():
        facts[name] = (
            f"{plural(split.pairs, 'pair')}, {split.source_tokens} and {split.target_tokens} tokens; the longest "
            f"sentence has {plural(split.longest, 'token')}"
        )
    left_out = ", ".join(f"{count} {reason}" for reason, count in manifest.left_out.items())
    unknown = {"unknown tokens": str(manifest.unknown)} if manifest.unknown else {}
    return {
        **facts,
        "vocabulary": str(manifest.vocab_size),
        **unknown,
        "left out": left_out or "none",
        "source": manifest.corpus,
    }


def document_text(prefix: Path, number: int) -> str:
    """A training pair as it was written, by its place in the data. Raises DataPrepError: there is none."""
    manifest = read_described(prefix, PairsManifest)
    count = manifest.splits["train"].pairs
    require_training_document(prefix, PAIRS, number, count)
    texts = [next(islice(lines(data_file(side_prefix(prefix, "train", side), ".txt")), number, None)) for side in SIDES]
    return _shown(manifest, texts)


def sample_text(prefix: Path, number: int, samples: int, seed: int, sequence_length: int) -> str:
    """A sample of a run, put together from its tokens. Raises DataPrepError: the run has no such sample, or the data
    cannot be used."""
    if not 0 <= number < samples:
        raise DataPrepError(f"--sample {number}: the run has the samples 0 to {samples - 1} (--samples)")
    manifest = read_described(prefix, PairsManifest)
    tokenizer = JsonTokenizer.from_file(data_file(prefix, ".tokenizer.json"), SPECIAL[3])
    with named(f"--sample {number}"):
        found = PairSamples(prefix, Split(samples, seed), sequence_length, sequence_length, manifest.vocab_size)
        sample = found.sample(number)
    tokens = (sample["text_enc"], sample["labels"])
    return _shown(manifest, [tokenizer.decode(side[side >= len(SPECIAL)]) for side in tokens])


def _shown(manifest: PairsManifest, texts: list[str]) -> str:
    return f"{manifest.source}: {texts[0]}\n{manifest.target}: {texts[1]}"
