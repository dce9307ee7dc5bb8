"""A video as it stands in a source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")


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
