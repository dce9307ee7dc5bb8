"""Images of any form as arrays of one size."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.visible import plural
from data_prep.errors import DataPrepError, missing_package
from data_prep.images.item import Content

if TYPE_CHECKING:
    from PIL.Image import Image


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
    """Of the pixels, by channel."""
    squares: list[int]


def packed(images: list[Raw], wanted: Wanted) -> list[Made]:
    """Each image, and what mean and deviation follow from; raises as `made`."""
    values = np.arange(256)
    found = []
    for pixels in made(images, wanted):
        counts = [np.bincount(pixels[:, :, channel].ravel(), minlength=256) for channel in range(pixels.shape[2])]
        sums = [int(count @ values) for count in counts]
        found.append(Made(pixels, sums, [int(count @ values**2) for count in counts]))
    return found


def made(images: list[Raw], wanted: Wanted) -> list[NDArray[np.uint8]]:
    """Each image as [height, width, channels].

    Raises:
        DataPrepError: one cannot be decoded, or Pillow is needed and is not here.
    """
    return [_made(image, wanted) for image in images]


def _made(raw: Raw, wanted: Wanted) -> NDArray[np.uint8]:
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
    found: Image = image.resize((width, height), _pillow().Resampling.BILINEAR, box, reducing_gap=3.0)
    return found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "to decode and to resize images") from error
    return Image
