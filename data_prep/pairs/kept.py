"""The file of the pairs that are fit, in the making: each a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from data_prep.pairs.pair import Pair

NAME = "kept"


def line(pair: Pair) -> bytes:
    return json.dumps(pair).encode() + b"\n"


def read(folder: Path) -> Iterator[Pair]:
    with (folder / NAME).open(encoding="utf-8", newline="\n") as file:
        for text in file:
            yield Pair(*json.loads(text))
