"""The noise of the gradient over a training, as it is expected: what a controller would measure."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fasop.errors import SearchError
from megatron_ext.contract.adaptive.noise import Halves

COLUMNS = ("samples", "noise_scale")
"""Of a CSV file."""


@dataclass(frozen=True)
class Noise:
    """The noise scale over consumed samples: a straight line of its logarithm between two points, and constant before
    the first and behind the last one."""

    samples: tuple[float, ...]
    """Upwards; one at least."""
    scales: tuple[float, ...]
    """Of each, above 0, in samples."""

    def at(self, samples: float) -> float:
        """The noise scale when so many samples were trained."""
        return math.exp(float(np.interp(samples, self._points, self._logarithms)))

    @cached_property
    def _points(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(self.samples, float)

    @cached_property
    def _logarithms(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.log(self.scales)

    @cached_property
    def turns(self) -> tuple[float, ...]:
        """The samples at which it begins to grow after it has fallen, or the other way round."""
        steps = np.diff(self._logarithms)
        found, before = [], 0.0
        for at, step in zip(self.samples, steps, strict=False):
            if step * before < 0.0:
                found.append(at)
            before = step or before
        return tuple(found)


def growing(first: float, last: float, samples: float) -> Noise:
    """From one noise scale at the beginning to another one after so many samples, by a constant factor a sample."""
    return Noise((0.0,), (first,)) if first == last else Noise((0.0, samples), (first, last))


def measured(points: Iterable[tuple[float, float | None]], source: str) -> Noise:
    """Of (samples, noise scale) as a run measured them; those without a noise scale are left out.

    Raises:
        SearchError: there are none, or samples do not go up.
    """
    known = [(samples, scale) for samples, scale in points if scale is not None and scale > 0.0]
    if not known:
        raise SearchError(
            f"noise={source}: has no noise scale; one is measured by a run with adapt.rule=noise, similarity or goodput"
        )
    samples, scales = zip(*known, strict=True)
    for before, after in itertools.pairwise(samples):
        if after <= before:
            raise SearchError(f"noise={source}: samples must go up, but {after:g} follows {before:g}")
    return Noise(samples, scales)


def read_csv(file: Path) -> Noise:
    """Of a file with the columns samples and noise_scale.

    Raises:
        SearchError: it cannot be read.
    """
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SearchError(f"noise={file}: cannot be read as a CSV file: {error}") from error
    points = []
    for number, row in enumerate(rows, 2):
        try:
            found = float(row[COLUMNS[0]]), float(row[COLUMNS[1]])
        except (KeyError, TypeError, ValueError):
            found = math.nan, math.nan
        if not (found[0] >= 0.0 and 0.0 < found[1] < math.inf and math.isfinite(found[0])):
            raise SearchError(
                f"noise={file}, line {number}: must have two numbers under {' and '.join(COLUMNS)}, the second above 0"
            )
        points.append(found)
    return measured(points, str(file))


def halves(scale: float, shares: Sequence[int], micro_batch_size: int) -> Halves:
    """What both halves of a batch say on average, where the noise scale is this one.

    Of a gradient of norm 1: the mean gradient of b samples has the squared norm 1 + scale / b, and the product of both
    halves is 1.
    """
    count = sum(shares)
    even, odd = (count + 1) // 2, count // 2
    if not odd:  # a single micro-batch says nothing
        return Halves(0.0, 0.0, 0.0, 1.0, count * micro_batch_size, 0)
    part = even / count
    even_square = part**2 * (1.0 + scale / (even * micro_batch_size))
    odd_square = (1.0 - part) ** 2 * (1.0 + scale / (odd * micro_batch_size))
    both = part * (1.0 - part)
    return Halves(
        even=even_square,
        whole=even_square + 2.0 * both + odd_square,
        product=even_square + both,
        weight=part,
        even_samples=even * micro_batch_size,
        odd_samples=odd * micro_batch_size,
    )
