"""A video as it stands in a source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataPrepError
from data_prep.images.image import NAMED
from megatron_ext.contract.files import read_regular_text, why


class Video(NamedTuple):
    name: str
    """In the source, wherever that lies."""
    captions: tuple[str, ...]
    length: int
    """Frames."""
    split: str = ""
    """One of `SPLITS` where the source says so; else empty."""


class Reader(Protocol):
    """Videos of one source, always in the same order."""

    @property
    def synthetic(self) -> bool:
        """Whether nobody has filmed them."""
        ...

    @property
    def features(self) -> int:
        """Numbers that describe a frame."""
        ...

    @property
    def files(self) -> dict[Path, str]:
        """All that the videos follow from, and their names."""
        ...

    def videos(self) -> list[Video]:
        """Raises DataPrepError: nobody can tell what is in the files."""
        ...

    def frames(self, video: Video) -> NDArray[np.float32]:
        """[length, features]. Raises DataPrepError: a file cannot be read."""
        ...


CAPTIONS = "captions.tsv"
FORM = "each line must have the name of a video, a tab, and a sentence about it"


class OwnFolder:
    """captions.tsv lies in the folder itself, or in folders in it that are called train, valid and test."""

    synthetic = False

    def __init__(self, folder: Path) -> None:
        own = [folder / CAPTIONS] if (folder / CAPTIONS).is_file() else sorted(folder.glob(f"*/{CAPTIONS}"))
        below = {path: NAMED.get(path.parent.name.lower(), "") for path in own if path.parent != folder}
        if not own or not all(below.values()):
            raise DataPrepError(
                f"--source {folder}: has no {CAPTIONS}; {FORM}, and NAME.npy beside it the features of its frames. The "
                "file may also lie in folders called train, valid and test"
            )
        self._folder = folder
        self._found = [video for path in own for video in self._read(path, below.get(path, ""))]
        self.files = {path: str(path.relative_to(folder)) for path in own}
        self.files |= {self._path(video): f"{video.name}.npy" for video in self._found}
        self.features = int(self._open(self._found[0]).shape[1])

    def videos(self) -> list[Video]:
        return self._found

    def frames(self, video: Video) -> NDArray[np.float32]:
        found = np.asarray(self._open(video), np.float32)
        if found.shape[1] != self.features:
            raise DataPrepError(
                f"{self._path(video)}: a frame has {found.shape[1]} features, but those of {self._found[0].name}.npy "
                f"have {self.features}; all videos need as many"
            )
        if not np.isfinite(found).all():
            raise DataPrepError(f"{self._path(video)}: not all of its numbers are finite; extract the features again")
        return found

    def _read(self, path: Path, split: str) -> list[Video]:
        captions: dict[str, list[str]] = {}
        try:
            lines = read_regular_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataPrepError(f"{path}: cannot be read as UTF-8 text: {why(error)}") from error
        for number, line in enumerate(lines, 1):
            name, tab, caption = line.partition("\t")
            if not line.strip():
                continue
            if not tab or not name or not caption.strip() or Path(name).name != name:
                raise DataPrepError(f"{path}: line {number}: {line[:60]!r}: {FORM}")
            captions.setdefault(name, []).append(caption.strip())
        if not captions:
            raise DataPrepError(f"{path}: has no caption; {FORM}")
        below = "" if path.parent == self._folder else f"{path.parent.name}/"
        videos = [Video(f"{below}{name}", tuple(lines), 0, split) for name, lines in captions.items()]
        return [video._replace(length=len(self._open(video))) for video in videos]

    def _path(self, video: Video) -> Path:
        return self._folder / f"{video.name}.npy"

    def _open(self, video: Video) -> NDArray[np.floating]:
        path = self._path(video)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataPrepError(f"{path}: the features of video {video.name} cannot be read: {why(error)}") from error
        if found.ndim != 2 or not len(found) or not found.shape[1] or found.dtype.kind not in "fiu":
            raise DataPrepError(
                f"{path}: has {list(found.shape)} of {found.dtype}, but must have [frames, features], numbers"
            )
        return found


SIDE = 12
LENGTHS = (8, 16)
"""The fewest and the most frames."""
HALF = {"small": 1.5, "large": 2.5}
"""Half of a shape's width, in pixels."""
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
