"""Drawn videos: a shape that moves over 12 x 12 pixels, and sentences that say so. They are synthetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.videos.video import Video

SIDE = 12
LENGTHS = (8, 16)
"""The fewest and the most frames."""
HALF = {"small": 1.5, "large": 2.5}
"""Of a shape's width, in pixels."""
SHAPES = ("square", "circle", "cross")
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Rows and columns."""
NOISE = 0.1


class Shapes:
    """So many videos, each of which follows from the seed and its number."""

    synthetic = True
    features = SIDE * SIDE

    def __init__(self, count: int, seed: int) -> None:
        self.files: dict[Path, str] = {}
        self._count = count
        self._seed = seed

    def videos(self) -> list[Video]:
        return [self._video(number) for number in range(self._count)]

    def frames(self, video: Video) -> NDArray[np.float32]:
        number = int(video.name)
        size, shape, move, source = self._drawn(number)
        source.integers(*LENGTHS, endpoint=True)
        found = np.zeros((video.length, SIDE, SIDE), np.float32)
        half, way = HALF[size], np.array(MOVES[move], float)
        margin = half + 0.5
        across = source.uniform(margin, SIDE - margin)
        places = np.linspace(margin, SIDE - margin, video.length)[:: int(way.sum())]
        rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
        for frame, along in zip(found, places, strict=True):
            row, column = (along, across) if way[0] else (across, along)
            frame[_inside(shape, np.abs(rows - row), np.abs(columns - column), half)] = 1.0
        found += source.normal(0.0, NOISE, found.shape).astype(np.float32)
        return found.reshape(video.length, -1)

    def _video(self, number: int) -> Video:
        size, shape, move, source = self._drawn(number)
        length = int(source.integers(*LENGTHS, endpoint=True))
        way = f"to the {move}" if move in ("left", "right") else move
        return Video(str(number), (f"a {size} {shape} moves {way}", f"the {shape} is {size} and goes {way}"), length)

    def _drawn(self, number: int) -> tuple[str, str, str, np.random.Generator]:
        source = np.random.Generator(np.random.PCG64([self._seed, number]))
        size, shape, move = (str(source.choice(names)) for names in (list(HALF), SHAPES, list(MOVES)))
        return size, shape, move, source


def _inside(shape: str, down: NDArray[np.float64], across: NDArray[np.float64], half: float) -> NDArray[np.bool_]:
    """Which pixels, by how far their centres are from the shape's."""
    if shape == "circle":
        found: NDArray[np.bool_] = down**2 + across**2 <= half**2
    elif shape == "cross":
        found = (np.maximum(down, across) <= half) & (np.minimum(down, across) <= 0.5)
    else:
        found = np.maximum(down, across) <= half
    return found
