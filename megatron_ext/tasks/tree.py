"""Tensors in tuples, lists and dictionaries: taken apart for a message or a sample, and put together again."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size, slice, type(Ellipsis))
"""What may stand beside tensors; it must not change."""


class Slot(NamedTuple):
    """Where a tensor stands."""

    path: Tuple[str, ...]


class Kept(NamedTuple):
    """What is no tensor."""

    value: Any


class Nest(NamedTuple):
    """A tuple, list or dictionary."""

    kind: type
    keys: Tuple[Any, ...]
    parts: Tuple[Any, ...]


def apart(value: Any, path: Tuple[str, ...] = ()) -> Tuple[Any, List[Tensor]]:
    """The shape of a value, and its tensors.

    Raises:
        TypeError: it holds something that can neither be sent nor kept.
    """
    if isinstance(value, Tensor):
        return Slot(path), [value]
    if isinstance(value, PLAIN):
        return Kept(value), []
    if isinstance(value, dict):
        keys, values = tuple(value), list(value.values())
    elif isinstance(value, (tuple, list)):
        keys, values = tuple(range(len(value))), list(value)
    else:
        raise TypeError(f"a {type(value).__name__}, which is neither a tensor nor a tuple, list or dict of such")
    parts, tensors = [], []
    for key, one in zip(keys, values):
        part, found = apart(one, (*path, str(key)))
        parts.append(part)
        tensors += found
    return Nest(type(value), keys, tuple(parts)), tensors


def together(shape: Any, tensors: List[Tensor]) -> Any:
    """The inverse: takes the tensors from the front of the list."""
    if isinstance(shape, Slot):
        return tensors.pop(0)
    if isinstance(shape, Kept):
        return shape.value
    values = [together(part, tensors) for part in shape.parts]
    if issubclass(shape.kind, dict):
        made: Dict[Any, Any] = dict(zip(shape.keys, values))
        return made if shape.kind is dict else shape.kind(made)
    if hasattr(shape.kind, "_fields"):
        return shape.kind(*values)
    return tuple(values) if issubclass(shape.kind, tuple) else list(values)


def paths(shape: Any) -> List[Tuple[str, ...]]:
    """Where the tensors of a shape stand, in their order."""
    if isinstance(shape, Slot):
        return [shape.path]
    return [path for part in shape.parts for path in paths(part)] if isinstance(shape, Nest) else []


def names(name: str, shape: Any) -> List[str]:
    """A name for each tensor of a value of this name: its own, if it is a tensor."""
    return [".".join((name, *path)) for path in paths(shape)]
