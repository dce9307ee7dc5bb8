"""Which images are for training, which are held out: of each class the same share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from data_prep.images.item import SPLITS, Item


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
