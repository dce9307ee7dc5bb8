"""An image as it stands in a source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")
NAMED = {"train": "train", "training": "train", "valid": "valid", "val": "valid", "validation": "valid", "dev": "valid"}
NAMED |= {"test": "test", "testing": "test"}
"""What folders and arrays are called that hold one split."""
Content = bytes | NDArray[Any]
"""Of one image: a PNG or JPEG file, or pixels [height, width] or [height, width, channels], from 0 to 255."""


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
        """Of the items from `first` on. Raises DataPrepError: a file cannot be read."""
        ...
