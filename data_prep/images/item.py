"""An image as it stands in a source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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


def splits_of(items: Sequence[Item], weights: Sequence[float], seed: int) -> list[str]:
    """The split of each image; those of a class are in proportion to the weights, as near as whole images allow.

    Which ones are held out follows from seed and names alone. A class has at least one image in each split if it has
    as many images as there are splits. Splits that the source has are as they are, and are given no others.

    Args:
        items: all images.
        weights: of training, validation and test.
        seed: other seeds hold out other images.
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
