"""`tdpp data videos`: its options, and what they mean together."""

from __future__ import annotations

import argparse
from pathlib import Path

from conf.reading.values import option, prefix_path, whole
from data_prep.errors import DataPrepError
from data_prep.kinds import VIDEOS, VideosManifest
from data_prep.making import add_common_options, make_unless_there, weights_of
from data_prep.text.corpus import Corpus
from data_prep.videos.prepare import Request, prepare
from data_prep.videos.sources import CAPTIONS, OwnFolder, Reader, Shapes

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
    make.add_argument(
        "--output",
        type=option(prefix_path),
        required=True,
        help="the files are <output>-train.frames.npy and so on, and <output>.json",
    )
    make.add_argument(
        "--count", type=option(whole), metavar="N", help=f"with --source {SHAPES}: how many (default: {COUNT})"
    )
    make.add_argument(
        "--words",
        type=option(whole),
        default=WORDS,
        metavar="N",
        help="keep the N most frequent words of the training captions as the vocabulary (default: at most %(default)s)",
    )
    make.add_argument(
        "--split",
        default=SPLIT,
        metavar="W,W,W",
        help="weights of training, validation and test, of whole videos (default: %(default)s)",
    )
    add_common_options(make, "videos", workers=False)


def run(arguments: argparse.Namespace) -> None:
    """Prepares videos, or says that they are there; prints their prefix."""
    prefix: Path = arguments.output
    request = _request(arguments)
    recipe = request.recipe()
    make_unless_there(prefix, VIDEOS, recipe, arguments.force, lambda: summary(prepare(request, prefix, recipe)))


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


def _request(arguments: argparse.Namespace) -> Request:
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
    files = reader.files
    return Request(
        corpus=Corpus(description=source, files=tuple(files), names=tuple(files.values())),
        source=described,
        reader=reader,
        words=arguments.words,
        weights=weights_of(arguments.split),
        seed=arguments.seed,
    )
