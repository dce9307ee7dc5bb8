"""What a model is made of without torch: rows of layers, parameters, and what passes from block to block."""

from __future__ import annotations

import math
import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

Shapes = Dict[str, Tuple[int, ...]]
"""The shapes of parameters, by name."""


class Stack(NamedTuple):
    """Layers of one kind in a row. A partition counts them."""

    kind: str
    name: str
    """The layers are `name.0`, `name.1`, …"""
    layers: int
    tokens: int
    """Tokens of a sample that pass through it."""
    context: int = 0
    """Tokens of another stack's result that its layers attend to, too."""
    causal: bool = False
    """Whether a token attends to itself and those before it alone, as in a decoder."""
    first: int = 0
    """The number of its first layer, if the layers are called as those of a stack before it."""


def present(*stacks: Stack) -> Tuple[Stack, ...]:
    """Those that have layers."""
    return tuple(stack for stack in stacks if stack.layers > 0)


class Parameter(NamedTuple):
    """A parameter of the whole model."""

    shape: Tuple[int, ...]
    cut: Optional[int] = None
    """The dimension that a tensor group shares out; None: every rank has all of it."""
    pieces: Tuple[int, ...] = (1,)
    """Relative lengths of the pieces along `cut` that are each shared out."""
    rows: Optional[int] = None
    """How many rows count, if the others only pad it; None: all do."""

    def numel(self, tensor: int) -> int:
        """How many numbers of it a rank has in a tensor group of this size."""
        return math.prod(self.shape) // (1 if self.cut is None else tensor)

    def unpadded(self) -> int:
        """How many numbers are in the rows that count."""
        return math.prod(self.shape[1:]) * (self.shape[0] if self.rows is None else self.rows)


Parameters = Dict[str, Parameter]


def linear_parameters(name: str, weight: Parameter, bias: bool) -> Parameters:
    """A linear layer. Its bias is cut as the outputs are; one of outputs that are summed is whole."""
    of_outputs = Parameter(weight.shape[:1], *((0, weight.pieces) if weight.cut == 0 else ()))
    return {f"{name}.weight": weight, **({f"{name}.bias": of_outputs} if bias else {})}


class Wire(NamedTuple):
    """What blocks that lie at one place give to others. Counted blocks lie at their numbers, what the first stage has
    beside them at -1, and what the last stage has at their count."""

    giver: int
    takers: Tuple[int, ...]
    numbers: int
    """Numbers of a sample that pass."""


class ImageBlock(NamedTuple):
    """One block of an image model."""

    name: str
    kind: str
    parameters: Shapes
    """Those that are trained."""
    products: int
    """Multiplications of a sample's forward pass."""
    gives: Tuple[int, ...]
    """The shape of what leaves it, of a sample: [channels, height, width], [tokens, hidden] or [numbers]."""
    counted: bool = True
    """Whether a partition counts it; else it is on the first or on the last stage."""


_MOST_ROWS = 3
"""That are named one by one."""


def in_words(names: Sequence[str]) -> str:
    """`encoder.0-3 + norm`: neighbours whose names differ by a number are a row; of many rows, first and last name."""
    # First and last name of each row.
    rows: List[Tuple[str, str]] = []
    for name in names:
        stem, number = _split(name)
        if rows and number >= 0 and _split(rows[-1][1]) == (stem, number - 1):
            rows[-1] = rows[-1][0], name
        else:
            rows.append((name, name))
    if len(rows) > _MOST_ROWS:
        return f"{names[0]} to {names[-1]} ({len(names)})"
    return " + ".join(first if first == last else f"{first}-{_split(last)[1]}" for first, last in rows)


def _split(name: str) -> Tuple[str, int]:
    """`layers.7` -> ("layers.", 7); a name without a number has -1."""
    found = re.fullmatch(r"(.*\.|)([0-9]{1,9})", name)
    return (name, -1) if found is None else (found[1], int(found[2]))
