"""A model as pieces that can lie on different stages, and the values that they pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Tuple

from torch import fx, nn


class Piece(NamedTuple):
    """A part of a model that a block is made of."""

    name: str
    module: nn.Module
    """Parameters have their names in the user's module."""
    takes: Tuple[str, ...]
    """Names of values, in the order of the module's arguments; a value is a tensor, or tensors in tuples and such."""
    gives: Tuple[str, ...]
    """Names of values; the module returns a tuple of them if they are several."""
    keywords: Optional[Tuple[str, ...]] = None
    """The names of the arguments; None: they are passed by their places."""
    where: str = ""
    """In the user's code."""
    unforeseen: Tuple[str, ...] = ()
    """Of what it gives, what follows from what is in tensors; so it must be tensors, too."""


class Pieces(NamedTuple):
    """A model in pieces."""

    pieces: Tuple[Piece, ...]
    inputs: Tuple[str, ...]
    """The arguments of its forward pass that it is given."""
    output: Any
    """What it returns, with `Value`s in the place of what pieces give."""


@dataclass(frozen=True)
class Value:
    """Stands for a value."""

    name: str


def one_piece(model: nn.Module, inputs: Tuple[str, ...]) -> Pieces:
    """A model that is not cut."""
    return Pieces((Piece(type(model).__name__, model, inputs, ("output",), inputs),), inputs, Value("output"))


def children(model: nn.Sequential, inputs: Tuple[str, ...]) -> Pieces:
    """A piece per child."""
    pieces: List[Piece] = []
    taken = inputs
    for name, child in model.named_children():
        graph = fx.Graph()
        graph.output(graph.call_module(name, tuple(graph.placeholder(one) for one in taken)))
        module = fx.GraphModule({name: child}, graph)
        pieces.append(Piece(name, module, taken, (f"after_{name}",)))
        taken = pieces[-1].gives
    return Pieces(tuple(pieces), inputs, Value(taken[0]))
