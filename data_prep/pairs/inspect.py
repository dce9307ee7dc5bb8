"""What pairs hold: counts, and the text of one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from conf.visible import plural
from data_prep.errors import DataPrepError
from data_prep.kinds import read_described
from data_prep.pairs.lines import lines
from data_prep.pairs.manifest import PairsManifest
from data_prep.pairs.pair import SIDES
from data_prep.tokenizers.both_languages import SPECIAL
from data_prep.tokenizers.tokenizer import JsonTokenizer
from megatron_ext.contract.errors import DataError
from megatron_ext.data.indexed_dataset import data_file
from megatron_ext.data.pairs import PairSamples, side_prefix
from megatron_ext.data.samples import Split


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


def pair_text(prefix: Path, number: int) -> str:
    """A training pair as it was written, by its place in the data.

    Raises:
        DataPrepError: there is none.
    """
    manifest = read_described(prefix, PairsManifest)
    count = manifest.splits["train"].pairs
    if not 0 <= number < count:
        raise DataPrepError(f"--document {number}: {prefix} has the training pairs 0 to {count - 1}")
    texts = [next(islice(lines(data_file(side_prefix(prefix, "train", side), ".txt")), number, None)) for side in SIDES]
    return _shown(manifest, texts)


def sample_text(prefix: Path, number: int, samples: int, seed: int, sequence_length: int) -> str:
    """A sample of a run, put together from its tokens.

    Raises:
        DataPrepError: the run has no such sample, or the data cannot be used.
    """
    if not 0 <= number < samples:
        raise DataPrepError(f"--sample {number}: the run has the samples 0 to {samples - 1} (--samples)")
    manifest = read_described(prefix, PairsManifest)
    tokenizer = JsonTokenizer.from_file(data_file(prefix, ".tokenizer.json"), SPECIAL[3])
    try:
        sample = PairSamples(
            prefix, Split(samples, seed), sequence_length, sequence_length, manifest.vocab_size
        ).sample(number)
    except DataError as error:
        raise DataPrepError(f"--sample {number}: {error}") from error
    tokens = (sample["text_enc"], sample["labels"])
    return _shown(manifest, [tokenizer.decode(side[side >= len(SPECIAL)]) for side in tokens])


def _shown(manifest: PairsManifest, texts: list[str]) -> str:
    return f"{manifest.source}: {texts[0]}\n{manifest.target}: {texts[1]}"
