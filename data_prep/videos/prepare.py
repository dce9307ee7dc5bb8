"""From videos and captions to what S2VT models read."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import write_array_header_1_0

from data_prep.errors import DataPrepError
from data_prep.files.journal import publish
from data_prep.files.progress import hashes, shown
from data_prep.images import image
from data_prep.kinds import VideosManifest, VideosSplit, weights_of
from data_prep.making import SplitRequest, add_common_options, add_number, add_output, add_split, making
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.special import SPECIAL, finished_words
from data_prep.tokenizers.vocabulary import doubt, warn
from data_prep.videos.sources import CAPTIONS, OwnFolder, Reader, Shapes, Video
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import UNKNOWN
from megatron_ext.data.samples import SPLITS

WORD = re.compile(r"\w+(?:['’]\w+)*")
NUMBER, TOKEN = np.dtype("<f4"), np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class VideosRequest(SplitRequest):
    source: str
    """What else they follow from."""
    reader: Reader
    words: int
    """The most words of the vocabulary."""

    def recipe(self) -> dict[str, Any]:
        return {
            "corpus_sha256": self.corpus.digest(),
            "source": self.source,
            "words": self.words,
            "split": list(self.weights),
            "seed": self.seed,
        }


def prepare(request: VideosRequest, prefix: Path, recipe: dict[str, Any]) -> VideosManifest:
    """Writes videos, captions and their manifest. Nothing half-written takes their names. Raises DataPrepError: a video
    cannot be used, or the files cannot be written."""
    splits = splits_of(request.reader.videos(), request.weights, request.seed)
    if not splits["train"]:
        raise DataPrepError(f"--source {request.corpus.description}: every video is held out; give some for training")
    vocabulary = words_of(splits["train"], request.words)
    with making(prefix, recipe) as journal:
        folder, counts = journal.folder, Counter[str]()
        with shown("packing videos", sum(map(len, splits.values()))) as show:
            made = {}
            for split, videos in splits.items():
                part = Counter[str]()
                made[split] = _write(folder, split, videos, request.reader, vocabulary, part)
                source = f"--source {request.corpus.description}: captions of {split}"
                warn(doubt(part["unknown"], part["words"], source, f"take more words than --words {request.words}"))
                counts += part
                show.advance(len(videos))
        write_atomic(folder / ".tokenizer.json", finished_words(vocabulary).content)
        kinds = (".frames.npy", ".lengths.npy", ".videos.npy", ".captions.bin", ".captions.idx", ".captions.txt")
        names = {name: name for name in (*(f"-{split}{kind}" for split in SPLITS for kind in kinds), ".tokenizer.json")}
        manifest = VideosManifest(
            features=request.reader.features,
            vocab_size=len(SPECIAL) + len(vocabulary),
            unknown=counts["unknown"],
            synthetic=request.reader.synthetic,
            splits=made,
            corpus=request.corpus.description,
            sha256=hashes({suffix: folder / name for suffix, name in names.items()}),
        )
        publish(folder, prefix, names, manifest.to_json(recipe))
        return manifest


def splits_of(videos: Sequence[Video], weights: Sequence[float], seed: int) -> dict[str, list[Video]]:
    """The videos of each split; whole videos are held out, as images of one class are."""
    found = image.splits_of([image.Item(one.name, one.name, "", one.split) for one in videos], weights, seed)
    return {split: [video for video, own in zip(videos, found, strict=True) if own == split] for split in SPLITS}


def words_of(videos: Sequence[Video], most: int) -> list[str]:
    """The most frequent words of captions, the frequent ones first."""
    counts = Counter(word for video in videos for caption in video.captions for word in split_words(caption))
    return sorted(counts, key=lambda word: (-counts[word], word))[:most]


def split_words(caption: str) -> list[str]:
    """In lower case, without punctuation."""
    return WORD.findall(caption.lower())


def _write(
    folder: Path, split: str, videos: Sequence[Video], reader: Reader, vocabulary: Sequence[str], counts: Counter[str]
) -> VideosSplit:
    lengths = [video.length for video in videos]
    with (folder / f"-{split}.frames.npy").open("wb") as file:
        header = {"descr": NUMBER.str, "fortran_order": False, "shape": (sum(lengths), reader.features)}
        write_array_header_1_0(file, header)
        for video in videos:
            file.write(np.ascontiguousarray(reader.frames(video), NUMBER).data)
    captions = [(number, split_words(one)) for number, video in enumerate(videos) for one in video.captions]
    captions = [(number, words) for number, words in captions if words]
    ids = {word: number for number, word in enumerate(vocabulary, len(SPECIAL))}
    tokens = [np.array([ids.get(word, UNKNOWN) for word in words], TOKEN) for _, words in captions]
    counts["words"] += sum(map(len, tokens))
    counts["unknown"] += sum(int((one == UNKNOWN).sum()) for one in tokens)
    np.save(folder / f"-{split}.lengths.npy", np.array(lengths, np.int64))
    np.save(folder / f"-{split}.videos.npy", np.array([number for number, _ in captions], np.int64))
    write_indexed(folder / f"-{split}.captions", tokens, np.dtype("<i4"))
    text = "".join(f"{' '.join(words)}\n" for _, words in captions)
    (folder / f"-{split}.captions.txt").write_text(text, encoding="utf-8")
    longest = max((len(one) for one in tokens), default=0)
    return VideosSplit(videos=len(videos), captions=len(captions), longest=longest)


SPLIT = "80,10,10"
SHAPES = "shapes"
COUNT, WORDS = 1000, 20_000


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data videos` takes."""
    make.add_argument(
        "--source",
        required=True,
        metavar="PATH",
        help=f"a folder with {CAPTIONS} (in each line a video's name, a tab and a sentence) and NAME.npy, [frames, "
        f"features], for each video, which may be below train, valid and test; or {SHAPES}: drawn shapes that move",
    )
    add_output(make, "<output>-train.frames.npy")
    add_number(make, "--count", f"with --source {SHAPES}: how many (default: {COUNT})")
    words = "keep the N most frequent words of the training captions as the vocabulary (default: at most %(default)s)"
    add_number(make, "--words", words, WORDS)
    add_split(make, SPLIT, "of whole videos")
    add_common_options(make, "videos", workers=False)


def summary(made: VideosManifest) -> str:
    """What was prepared, in a line."""
    splits = ", ".join(f"{split.videos} {name}" for name, split in made.splits.items())
    captions = sum(split.captions for split in made.splits.values())
    longest = 1 + max(split.longest for split in made.splits.values())
    unknown = f", {made.unknown} unknown words" if made.unknown else ""
    return (
        f"{splits} {'synthetic ' * made.synthetic}videos with {captions} captions{unknown} of {made.corpus}; "
        f"model.features={made.features} model.vocab_size={made.vocab_size}, and "
        f"model.decoder_sequence_length={longest} has room for the longest"
    )


def request_of(arguments: argparse.Namespace) -> VideosRequest:
    """What the options ask for."""
    source: str = arguments.source
    reader: Reader
    if source == SHAPES:
        count = arguments.count or COUNT
        reader, described = Shapes(count, arguments.seed), f"{SHAPES} {count}"
    else:
        if not Path(source).is_dir():
            raise DataPrepError(f"--source {source}: not a folder; give one with {CAPTIONS}, or {SHAPES}")
        if arguments.count is not None:
            raise DataPrepError(f"--count {arguments.count}: is for --source {SHAPES}; leave it out")
        reader, described = OwnFolder(Path(source)), ""
    return VideosRequest(
        corpus=Corpus.of(source, reader.files),
        source=described,
        reader=reader,
        words=arguments.words,
        weights=weights_of(arguments.split),
        seed=arguments.seed,
    )
