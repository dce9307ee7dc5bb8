"""The kinds of inputs that are drawn: a module each, with a function `draw`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random

from tests.fuzz.trial import Trial, attempt, ready, scratch

KINDS = ("overrides", "data", "profiles", "schedules", "runs", "logs")
Draw = Callable[[Random, Path], list[str]]
"""From chance and a folder, where it may put files, to the command line to try there."""


def trials(kind: str, seed: int, count: int) -> Iterator[tuple[int, Trial]]:
    """`count` trials of a kind, each with the seed that draws it again."""
    ready()
    draw: Draw = import_module(f"tests.fuzz.{kind}").draw
    for number in range(seed, seed + count):
        with scratch() as folder:
            argv = [word.replace("\0", "") for word in draw(Random(f"{kind} {number}"), folder)]  # no argv can have one
            yield number, attempt(argv, folder)
