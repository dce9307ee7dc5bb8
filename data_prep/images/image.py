"""An image as it stands in a source."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from conf.visible import plural
from data_prep.errors import DataPrepError, missing_package
from megatron_ext.data.samples import SPLITS

if TYPE_CHECKING:
    from PIL.Image import Image


NAMED = {"train": "train", "training": "train", "valid": "valid", "val": "valid", "validation": "valid", "dev": "valid"}
NAMED |= {"test": "test", "testing": "test"}
"""What folders and arrays are called that hold one split."""
Content = bytes | NDArray[Any]
"""One image: a PNG or JPEG file, or pixels [height, width] or [height, width, channels], from 0 to 255."""


class Item(NamedTuple):
    name: str
    """Where the image is, for people."""
    key: str
    """Its name in the source, wherever that lies."""
    label: str
    """The name of its class."""
    split: str = ""
    """One of `SPLITS` where the source says so; else empty."""


class Reader(Protocol):
    """Images out of files of one kind, always in the same order."""

    @property
    def files(self) -> dict[Path, str]:
        """All that the images follow from, and their names."""
        ...

    def items(self) -> list[Item]:
        """Raises DataPrepError: nobody can tell what is in the files."""
        ...

    def contents(self, first: int) -> Iterator[Content]:
        """Yields the items from `first` on. Raises DataPrepError: a file cannot be read."""
        ...


def splits_of(items: Sequence[Item], weights: Sequence[float], seed: int) -> list[str]:
    """The split of each image; those of a class are in proportion to the weights, as near as whole images allow.

    Which ones are held out follows from seed and names alone. A class has at least one image in each split if it has
    as many images as there are splits. Splits that the source has are as they are, and are given no others.
    """
    there = {item.split for item in items if item.split and item.split != "train"}
    shares = {split: weight for split, weight in zip(SPLITS, weights, strict=True) if weight and split not in there}
    found = [item.split for item in items]
    classes: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        if item.split in ("", "train"):
            found[number] = "train"
            classes.setdefault(item.label, []).append(number)
    for members in classes.values():
        members.sort(
            key=lambda number: hashlib.sha256(f"{seed}\0{items[number].key}".encode(errors="surrogatepass")).digest()
        )
        taken = 0
        for split, count in held_out(len(members), shares).items():
            for number in members[taken : taken + count]:
                found[number] = split
            taken += count
    return found


def held_out(images: int, shares: dict[str, float]) -> dict[str, int]:
    """How many images of a class each split takes but that of training, which keeps at least one."""
    total, left, found = sum(shares.values()), images - 1, {}
    for split in [split for split in reversed(SPLITS) if split in shares and split != "train"]:
        least = 1 if images >= len(shares) else 0
        found[split] = min(left, max(least, round(images * shares[split] / total)))
        left -= found[split]
    return found


class Shape(NamedTuple):
    height: int
    width: int
    channels: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width} pixels, {plural(self.channels, 'channel')}"


@dataclass(frozen=True)
class Wanted:
    """What images are to be made; what is None is left as it is."""

    size: tuple[int, int] | None
    """Height and width."""
    channels: int | None
    """1 or 3."""


class Raw(NamedTuple):
    name: str
    content: Content


class Made(NamedTuple):
    """An image as it is packed."""

    pixels: NDArray[np.uint8]
    """[height, width, channels]"""
    sums: list[int]
    """Sums of the pixels, by channel."""
    squares: list[int]


def packed(images: list[Raw], wanted: Wanted) -> list[Made]:
    """Each image, and what mean and deviation follow from; raises as `made`."""
    values = np.arange(256)
    found = []
    for image in images:
        pixels = made(image, wanted)
        counts = [np.bincount(pixels[:, :, channel].ravel(), minlength=256) for channel in range(pixels.shape[2])]
        sums = [int(count @ values) for count in counts]
        found.append(Made(pixels, sums, [int(count @ values**2) for count in counts]))
    return found


def made(raw: Raw, wanted: Wanted) -> NDArray[np.uint8]:
    """An image as [height, width, channels]. Raises DataPrepError: it cannot be decoded, or Pillow is needed and is not
    here."""
    content = raw.content
    if not isinstance(content, bytes):
        found = content if content.ndim == 3 else content[:, :, np.newaxis]
        as_it_is = wanted.size in (None, found.shape[:2]) and wanted.channels in (None, found.shape[2])
        if as_it_is:
            return np.ascontiguousarray(found)
        image = _pillow().fromarray(content if found.shape[2] == 3 else found[:, :, 0])
    else:
        image = _decoded(raw.name, content)
    image = image.convert("L" if wanted.channels == 1 or (wanted.channels is None and _is_grey(image)) else "RGB")
    if wanted.size is not None:
        image = _resized(image, *wanted.size)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, np.newaxis]


def _is_grey(image: Image) -> bool:
    return image.mode in ("1", "L", "LA", "I", "I;16", "F")


def _decoded(name: str, content: bytes) -> Image:
    pillow = _pillow()
    image: Image
    try:
        image = pillow.open(io.BytesIO(content), formats=["PNG", "JPEG"])
        image.load()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataPrepError(
            f"{name}: cannot be decoded as a PNG or JPEG image ({error}); get it again, or remove it"
        ) from error
    if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would cut off at 255
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def _resized(image: Image, height: int, width: int) -> Image:
    """The middle of the image, as large as the wanted shape allows, scaled to it."""
    if (image.height, image.width) == (height, width):
        return image
    scale = min(image.height / height, image.width / width)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = (left, top, left + width * scale, top + height * scale)
    return image.resize((width, height), _pillow().Resampling.BILINEAR, box, reducing_gap=3.0)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "to decode and to resize images") from error
    return Image
