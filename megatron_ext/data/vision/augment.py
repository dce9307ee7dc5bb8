"""Changes of an image while a model is trained: a cut of its padded self, a mirror image, RandAugment, random erasing.

Each image's follow from the seed and its sample's number, so that no layout changes them. Mixup and CutMix (Zhang et
al. 2018, Yun et al. 2019) mix the first image of a micro-batch with the last, the second with the one before it, and so
on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional, Tuple

import numpy as np

from megatron_ext.contract.plan_parts import Augment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]
    Floats = NDArray[np.float32]

CHANGING, ERASING, MIXING = 0xA06, 0xE7A5, 0x313
"""Set the random numbers of each purpose apart."""
HIGHEST = 10.0
"""Magnitude."""
FILL = 128
"""The colour of what a turned or moved image does not cover."""
ERASED_AREA = (0.02, 1 / 3)
"""The least and the largest part of an image that is erased; its sides have a ratio of up to `ERASED_RATIO`."""
ERASED_RATIO = 10 / 3
GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""ITU-R 601."""


def source(seed: int, number: int, purpose: int = CHANGING) -> np.random.RandomState:
    """Random numbers of a sample, or of a micro-batch with this first sample."""
    return np.random.RandomState([seed, purpose, number & 0xFFFFFFFF, number >> 32])


def changed(image: Pixels, changes: Augment, random: np.random.RandomState) -> Pixels:
    """An image [height, width, channels] of the same size."""
    if changes.padding:
        image = _cut(image, changes.padding, random)
    if changes.flip and random.randint(2):
        image = image[:, ::-1]
    for _ in range(changes.rand_augment):
        operation = OPERATIONS[random.randint(len(OPERATIONS))]
        sign = 1 if random.randint(2) else -1
        image = operation(image, changes.rand_augment_magnitude / HIGHEST, sign)
    return image


def erase(image: Floats, rate: float, random: np.random.RandomState) -> None:
    """Fills a rectangle of an image [height, width, channels] with normal noise in so many of the cases."""
    if random.random_sample() >= rate:
        return
    height, width = image.shape[:2]
    for _ in range(10):
        area = height * width * random.uniform(*ERASED_AREA)
        ratio = math.exp(random.uniform(-1.0, 1.0) * math.log(ERASED_RATIO))
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < columns < width:
            top, left = random.randint(height - rows + 1), random.randint(width - columns + 1)
            noise = random.standard_normal((rows, columns, image.shape[2]))
            image[top : top + rows, left : left + columns] = noise.astype(np.float32)
            return


def _cut(image: Pixels, padding: int, random: np.random.RandomState) -> Pixels:
    height, width = image.shape[:2]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = random.randint(2 * padding + 1, size=2).tolist()
    return padded[top : top + height, left : left + width]


def _mapped(
    image: Pixels, rows: Tuple[float, float], columns: Tuple[float, float], moved: Tuple[float, float]
) -> Pixels:
    """Every pixel from the place to which the matrix (rows, columns) and `moved` lead from it, around the middle."""
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float64)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    from_y = rows[0] * y + rows[1] * x + moved[0] + (height - 1) / 2
    from_x = columns[0] * y + columns[1] * x + moved[1] + (width - 1) / 2
    nearest_y, nearest_x = np.floor(from_y + 0.5).astype(int), np.floor(from_x + 0.5).astype(int)
    inside = (nearest_y >= 0) & (nearest_y < height) & (nearest_x >= 0) & (nearest_x < width)
    found: Pixels = image[nearest_y.clip(0, height - 1), nearest_x.clip(0, width - 1)]
    found[~inside] = FILL
    return found


def _blended(image: Pixels, other: Floats, factor: float) -> Pixels:
    """`other` at 0, the image at 1, and beyond it above."""
    mixed = other + (image.astype(np.float32) - other) * np.float32(factor)
    return (mixed + 0.5).clip(0, 255).astype(np.uint8)


def _grey(image: Pixels) -> Floats:
    """[height, width, 1]"""
    weights = GREY if image.shape[2] == len(GREY) else np.full(image.shape[2], 1 / image.shape[2], np.float32)
    return (image.astype(np.float32) * weights).sum(2, keepdims=True)


def identity(image: Pixels, _: float, __: int) -> Pixels:
    return image


def rotate(image: Pixels, strength: float, sign: int) -> Pixels:
    """Rotate by 30 degrees at most."""
    angle = math.radians(30.0 * strength * sign)
    cos, sin = math.cos(angle), math.sin(angle)
    return _mapped(image, (cos, sin), (-sin, cos), (0.0, 0.0))


def shear_x(image: Pixels, strength: float, sign: int) -> Pixels:
    return _mapped(image, (1.0, 0.0), (0.3 * strength * sign, 1.0), (0.0, 0.0))


def shear_y(image: Pixels, strength: float, sign: int) -> Pixels:
    return _mapped(image, (1.0, 0.3 * strength * sign), (0.0, 1.0), (0.0, 0.0))


def translate_x(image: Pixels, strength: float, sign: int) -> Pixels:
    """Shift by 0.45 of the width at most."""
    return _mapped(image, (1.0, 0.0), (0.0, 1.0), (0.0, 0.45 * strength * sign * image.shape[1]))


def translate_y(image: Pixels, strength: float, sign: int) -> Pixels:
    return _mapped(image, (1.0, 0.0), (0.0, 1.0), (0.45 * strength * sign * image.shape[0], 0.0))


def brightness(image: Pixels, strength: float, sign: int) -> Pixels:
    return _blended(image, np.zeros((1, 1, 1), np.float32), 1.0 + 0.9 * strength * sign)


def colour(image: Pixels, strength: float, sign: int) -> Pixels:
    return _blended(image, _grey(image), 1.0 + 0.9 * strength * sign)


def contrast(image: Pixels, strength: float, sign: int) -> Pixels:
    return _blended(image, _grey(image).mean(keepdims=True), 1.0 + 0.9 * strength * sign)


def sharpness(image: Pixels, strength: float, sign: int) -> Pixels:
    """The other one is smoothed, but for its edge."""
    smooth = image.astype(np.float32)
    if min(image.shape[:2]) > 2:
        height, width = image.shape[:2]
        whole = image.astype(np.float32)
        around = sum(whole[y : height - 2 + y, x : width - 2 + x] for y in range(3) for x in range(3))
        smooth[1:-1, 1:-1] = (around + 4.0 * whole[1:-1, 1:-1]) / 13.0
    return _blended(image, smooth, 1.0 + 0.9 * strength * sign)


def posterize(image: Pixels, strength: float, _: int) -> Pixels:
    """Keeps 8 to 4 bits."""
    return image & np.uint8(0xFF << round(4 * strength) & 0xFF)


def solarize(image: Pixels, strength: float, _: int) -> Pixels:
    """Turns what is bright into its opposite."""
    return np.where(image >= 256 * (1.0 - strength), 255 - image, image).astype(np.uint8)


def autocontrast(image: Pixels, _: float, __: int) -> Pixels:
    """Stretches each channel to all of 0 to 255."""
    low, high = image.min((0, 1)).astype(np.float32), image.max((0, 1)).astype(np.float32)
    spread = np.where(high > low, high - low, 255.0)
    low = np.where(high > low, low, 0.0)
    return ((image - low) * (255.0 / spread) + 0.5).clip(0, 255).astype(np.uint8)


def equalize(image: Pixels, _: float, __: int) -> Pixels:
    """Makes all levels of a channel about as frequent."""
    found = np.empty_like(image)
    for channel in range(image.shape[2]):
        pixels = image[:, :, channel]
        below = np.cumsum(np.bincount(pixels.ravel(), minlength=256))
        least = below[pixels.min()]
        if least == pixels.size:  # all alike
            found[:, :, channel] = pixels
            continue
        levels = ((below - least) * 255.0 / (pixels.size - least) + 0.5).clip(0, 255)
        found[:, :, channel] = levels.astype(np.uint8)[pixels]
    return found


OPERATIONS: Tuple[Callable[[Pixels, float, int], Pixels], ...] = (
    *(identity, rotate, shear_x, shear_y, translate_x, translate_y, brightness, colour, contrast, sharpness),
    *(posterize, solarize, autocontrast, equalize),
)
"""RandAugment's operations (Cubuk et al. 2020, section 3); a strength is from 0 to 1."""


class Mixing(NamedTuple):
    """How the images of a micro-batch are mixed."""

    share: float
    """The part that an image keeps, of its pixels and of the loss."""
    box: Optional[Tuple[slice, slice]] = None
    """Rows and columns that come from the other image; None: all pixels are mixed."""

    def apply(self, images: NDArray[np.float32]) -> None:
        """Mixes images [micro-batch, channels, height, width] in place."""
        others = images[::-1].copy()
        if self.box is not None:
            rows, columns = self.box
            images[:, :, rows, columns] = others[:, :, rows, columns]
            return
        images *= np.float32(self.share)
        images += others * np.float32(1.0 - self.share)


def drawn(changes: Augment, height: int, width: int, source: np.random.RandomState) -> Mixing:
    """With both, each is as likely."""
    cuts = changes.cutmix > 0 and (changes.mixup <= 0 or source.random_sample() < 0.5)
    alpha = changes.cutmix if cuts else changes.mixup
    share = float(source.beta(alpha, alpha))
    if not cuts:
        return Mixing(share)
    part = math.sqrt(1.0 - share)
    rows = _span(height, part, source.random_sample())
    columns = _span(width, part, source.random_sample())
    taken = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mixing(1.0 - taken / (height * width), (rows, columns))


def _span(length: int, part: float, place: float) -> slice:
    """Around a `place` from 0 to 1, cut off at both ends."""
    middle, half = int(place * length), int(length * part) / 2.0
    return slice(max(0, math.floor(middle - half)), min(length, math.floor(middle + half)))
