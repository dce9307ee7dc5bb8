"""Reads what is expected of the noise of the gradient over a training, from numbers or a file."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

from conf.reading.values import NoValue, above_0
from fasop.errors import SearchError
from megatron_ext.contract.adaptive.noise import Noise
from megatron_ext.contract.files import read_regular_text

COLUMNS = ("samples", "noise_scale")
"""Columns of a CSV file."""
NUMBERS = re.compile(r"[0-9.eE+,\s-]+")
"""What is not a name of a run or file."""


def growing(first: float, last: float, samples: float) -> Noise:
    """From one noise scale at the beginning to another one after so many samples, by a constant factor a sample."""
    return Noise((0.0,), (first,)) if first == last else Noise((0.0, samples), (first, last))


def measured(points: Iterable[tuple[float, float | None]], source: str) -> Noise:
    """Make the noise from (samples, noise scale) as a run measured them; those without a noise scale are left out.
    Raises SearchError: there are none, or samples do not go up."""
    known = [(samples, scale) for samples, scale in points if scale is not None and scale > 0.0]
    if not known:
        raise SearchError(f"noise={source}: has no noise scale; run with adapt.rule=noise, similarity or goodput")
    samples, scales = zip(*known, strict=True)
    for before, after in itertools.pairwise(samples):
        if after <= before:
            raise SearchError(f"noise={source}: samples must increase, but {after:g} follows {before:g}")
    return Noise(samples, scales)


def read_csv(file: Path) -> Noise:
    """Read a file with the columns samples and noise_scale. Raises SearchError: it cannot be read."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_regular_text(file), newline="")))
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


def of_numbers(text: str, samples: float) -> Noise:
    """Make the noise of a training of so many samples from one number, or from two joined by a comma: at the beginning
    and at the end. Raises SearchError: they are something else."""
    try:
        numbers = [above_0(part) for part in text.split(",")]
    except NoValue as rule:
        raise SearchError(
            f"noise={text} {rule}: one noise scale in samples, or two separated by a comma, at the beginning and at "
            f"the end"
        ) from rule
    if len(numbers) > 2:
        raise SearchError(
            f"noise={text} has {len(numbers)} numbers; give one or two, or a CSV file with the columns samples and "
            "noise_scale"
        )
    return growing(numbers[0], numbers[-1], samples)
