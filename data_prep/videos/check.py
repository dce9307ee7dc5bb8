"""Whether videos can be used, for a run or all of them in full; and what they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conf.schema.model import Model
from data_prep.errors import DataPrepError, named
from data_prep.indexed.check import highest_id
from data_prep.kinds import VideosManifest, read_described, read_unchanged, require_training_document
from data_prep.tokenizers.vocabulary import unknown_doubt, warn
from megatron_ext.contract.models.model import VIDEOS
from megatron_ext.data.indexed_dataset import data_file
from megatron_ext.data.samples import SPLITS
from megatron_ext.data.vision.videos import fitting, open_videos


def check_videos(model: Model, prefix: Path) -> list[str]:
    """Checks that videos can feed a model; returns what is odd about that, in words. Raises DataPrepError: they are
    missing, damaged, of other features or a larger vocabulary, or all captions too long."""
    given = f"data.prefix={prefix}"
    with named(given):
        found = open_videos(prefix, "train")
        kept = fitting(found, model.sized(1), prefix)
    needed = 1 + highest_id(found.captions)
    if needed > model.vocab_size:
        raise DataPrepError(
            f"{given} has token ids up to {needed - 1}, but model.vocab_size={model.vocab_size}; set it to what "
            "'tdpp data videos' printed, or choose other data"
        )
    lacking = unknown_doubt(found.captions, prefix, f"{given}: captions of train", in_full=False)
    doubts = [] if lacking is None else [lacking]
    if 2 * len(kept) >= len(found.videos):
        return doubts
    return [
        *doubts,
        f"{given}: only {len(kept)} of {len(found.videos)} captions are used; the others are longer than "
        f"model.decoder_sequence_length={model.sized(1).decoder_tokens} with their mark",
    ]


def check_in_full(prefix: Path) -> VideosManifest:
    """Checks hashes, shapes, token ids and counts; warns on stderr of many unknown words. Raises DataPrepError: they
    cannot be used."""
    manifest = read_unchanged(prefix, VideosManifest)
    for split in SPLITS:
        with named():
            found = open_videos(prefix, split)
        count = (len(found.starts) - 1, len(found.videos))
        known = manifest.splits[split]
        if count != (known.videos, known.captions):
            raise DataPrepError(
                f"{prefix}: {count[0]} videos and {count[1]} captions for {split}, but {prefix}.json has "
                f"{known.videos} and {known.captions}; prepare the data again"
            )
        warn(unknown_doubt(found.captions, prefix, f"{prefix}: captions of {split}", in_full=True))
        if len(found.videos) and highest_id(found.captions) >= manifest.vocab_size:
            raise DataPrepError(
                f"{prefix}: {split} has token ids up to {highest_id(found.captions)}, but {prefix}.json has a "
                f"vocabulary of {manifest.vocab_size}; prepare the data again"
            )
    return manifest


def described(prefix: Path) -> dict[str, str]:
    """What the manifest says, for people."""
    manifest = read_described(prefix, VideosManifest)
    facts = {"kind": "videos, synthetic" if manifest.synthetic else "videos", "features": str(manifest.features)}
    for split in SPLITS:
        known = manifest.splits[split]
        facts[split] = f"{known.videos} videos, {known.captions} captions of up to {known.longest} words"
    return {
        **facts,
        "vocabulary": f"{manifest.vocab_size}, {manifest.unknown} unknown words",
        "source": manifest.corpus,
    }


def document_text(prefix: Path, number: int) -> str:
    """The frames and the captions of a training video. Raises DataPrepError: there is none."""
    with named():
        found = open_videos(prefix, "train")
    count = len(found.starts) - 1
    require_training_document(prefix, VIDEOS, number, count)
    lines = data_file(Path(f"{prefix}-train.captions"), ".txt").read_text(encoding="utf-8").splitlines()
    frames = found.starts[number + 1] - found.starts[number]
    return "\n".join([f"frames: {frames}", *(lines[one] for one in np.flatnonzero(found.videos == number))])
