"""Mixup and CutMix (Zhang et al. 2018, Yun et al. 2019): the first image of a micro-batch is mixed with the last, the
second with the one before it, and so on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Optional, Tuple

import numpy as np

from megatron_ext.contract.plan_parts import Augment

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
