"""From videos and captions to what S2VT models read."""

from __future__ import annotations

import hashlib
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
from data_prep.images.item import held_out
from data_prep.kinds import VideosManifest, VideosSplit
from data_prep.making import making
from data_prep.text.corpus import Corpus
from data_prep.tokenizers.special import SPECIAL, finished_words
from data_prep.tokenizers.vocabulary import doubt, warn
from data_prep.videos.sources import SPLITS, Reader, Video
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import UNKNOWN

WORD = re.compile(r"\w+(?:['’]\w+)*")
NUMBER, TOKEN = np.dtype("<f4"), np.dtype("<u4")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be prepared, and how."""

    corpus: Corpus
    """All files that the videos follow from."""
    source: str
    """What else they follow from."""
    reader: Reader
    words: int
    """Of the vocabulary, at most."""
    weights: Sequence[float]
    """Of training, validation and test."""
    seed: int

    def recipe(self) -> dict[str, Any]:
        """All that the data follow from. Reads the whole corpus, with progress on stderr."""
        return {
            "corpus_sha256": self.corpus.digest(),
            "source": self.source,
            "words": self.words,
            "split": list(self.weights),
            "seed": self.seed,
        }


def prepare(request: Request, prefix: Path, recipe: dict[str, Any]) -> VideosManifest:
    """Writes videos, captions and their manifest. Nothing half-written takes their names.

    Raises:
        DataPrepError: a video cannot be used, or the files cannot be written.
    """
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
    """The videos of each split; whole videos are held out, by seed and names alone. Splits that the source has are as
    they are, and are given no others."""
    there = {video.split for video in videos if video.split and video.split != "train"}
    shares = {split: weight for split, weight in zip(SPLITS, weights, strict=True) if weight and split not in there}
    found: dict[str, list[Video]] = {split: [one for one in videos if one.split == split] for split in SPLITS}
    free = [video for video in videos if video.split in ("", "train")]
    order = sorted(free, key=lambda one: hashlib.sha256(f"{seed}\0{one.name}".encode(errors="surrogatepass")).digest())
    taken: dict[str, str] = {}
    for split, count in held_out(len(free), shares).items() if "train" in shares else ():
        taken.update({video.name: split for video in order[len(taken) : len(taken) + count]})
    found["train"] = [video for video in free if video.name not in taken]
    for split in set(taken.values()):
        found[split] = [video for video in free if taken.get(video.name) == split]
    return found


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
