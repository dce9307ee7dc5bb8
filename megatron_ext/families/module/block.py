"""The pieces of a user's module, which can lie on different stages, and the blocks made of them: these take and give
tensors by wire, and the same random numbers in every layout."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, fx, nn

from megatron_ext.families.module import tree
from megatron_ext.tasks.repeatable import Runs

HELD_AS = "module"
"""The name of the user's module in a block."""


class Form(NamedTuple):
    """How tensors become the arguments of a module, and its result tensors."""

    takes: Tuple[Any, ...]
    """The shape (`tree.apart`) of each argument."""
    keywords: Optional[Tuple[str, ...]]
    """The arguments' names; None: they are passed by their places."""
    gives: int
    """How many values the module returns: itself one, or a tuple of them."""
    kept: Tuple[int, ...]
    """Which of the tensors in what it returns are wires."""
    changed: Tuple[int, ...]
    """Which of the tensors it takes it changes in place."""
    random: bool
    """Whether it draws random numbers."""

    def call(self, module: nn.Module, tensors: List[Tensor]) -> Tuple[Any, ...]:
        """The values that the module returns."""
        rest = list(tensors)
        values = [tree.together(shape, rest) for shape in self.takes]
        given = module(*values) if self.keywords is None else module(**dict(zip(self.keywords, values)))
        return (given,) if self.gives == 1 else tuple(given)


class UserBlock(nn.Module):
    """Runs the user's module, on copies of what it changes in place."""

    first = 0
    """The number of the first sample of the micro-batch, over the run."""

    def __init__(self, module: nn.Module, form: Form, name: str, seed: int, recompute: bool) -> None:
        super().__init__()
        self.module = module
        self._form = form
        self._run = Runs(self, self._once, name, seed if form.random else None, recompute)

    def forward(self, *taken: Tensor) -> Any:
        return self._run(self.first, taken)

    def _once(self, *taken: Tensor) -> Any:
        form = self._form
        if form.random:  # dropout draws in the order of memory, which a tensor from another stage has lost
            taken = tuple(tensor.contiguous() for tensor in taken)
        tensors = [tensor.clone() if number in form.changed else tensor for number, tensor in enumerate(taken)]
        values = form.call(self.module, tensors)
        found = [tensor for value in values for tensor in tree.apart(value)[1]]
        kept = [found[number] for number in form.kept]
        return kept[0] if len(kept) == 1 else tuple(kept)


def copied(module: nn.Module, dtype: Optional[torch.dtype] = None, device: Optional[str] = None) -> nn.Module:
    """A copy of a module; with `device` meta, no memory is taken for what it holds.

    `dtype` is for all floating-point numbers.
    """
    memo: Dict[int, Any] = {}
    if dtype is not None or device is not None:
        for parameter in module.parameters():
            made = nn.Parameter(_as(parameter.detach(), dtype, device), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = made
        for buffer in module.buffers():
            memo[id(buffer)] = _as(buffer.detach(), dtype, device)
    return copy.deepcopy(module, memo)


def _as(tensor: Tensor, dtype: Optional[torch.dtype], device: Optional[str]) -> Tensor:
    wanted = dtype if tensor.is_floating_point() else None
    return tensor.to(device=device, dtype=wanted, copy=True)


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
    """What of its results follows from what is in tensors; so it must be tensors, too."""


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
