"""Tuples, lists and dictionaries, one inside the other.

Tensors in them are taken apart for a message or a sample, and put together again.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size, slice, type(Ellipsis))
"""What may stand beside tensors; it must not change."""


class Slot(NamedTuple):
    """Where a tensor stands."""

    path: Tuple[str, ...]


class Kept(NamedTuple):
    """What is not a tensor."""

    value: Any


class Nest(NamedTuple):
    """A tuple, list or dictionary."""

    kind: type
    keys: Tuple[Any, ...]
    """Keys of the parts; those of a tuple or list are numbers."""
    parts: Tuple[Any, ...]


def opened(value: Any) -> Optional[Nest]:
    """What a tuple, list or dictionary holds; None for anything else."""
    if isinstance(value, dict):
        return Nest(type(value), tuple(value), tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return Nest(type(value), tuple(range(len(value))), tuple(value))
    return None


def closed(nest: Nest) -> Any:
    """The inverse. torch.fx's lists and dictionaries, which cannot be changed, become ordinary ones."""
    if issubclass(nest.kind, dict):
        made = dict(zip(nest.keys, nest.parts))
        return made if nest.kind in (dict, immutable_dict) else nest.kind(made)
    if hasattr(nest.kind, "_fields"):
        return nest.kind(*nest.parts)
    return nest.parts if issubclass(nest.kind, tuple) else list(nest.parts)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with another in the place of each leaf: of what is not a tuple, list or dictionary."""
    nest = opened(value)
    if nest is None:
        return change(value)
    return closed(nest._replace(parts=tuple(mapped(part, change) for part in nest.parts)))


def leaves(value: Any) -> List[Any]:
    """What is not a tuple, list or dictionary, in its order."""
    nest = opened(value)
    return [value] if nest is None else [leaf for part in nest.parts for leaf in leaves(part)]


def apart(value: Any, path: Tuple[str, ...] = ()) -> Tuple[Any, List[Tensor]]:
    """The shape of a value, and its tensors. Raises TypeError: it holds something that can neither be sent nor kept."""
    if isinstance(value, Tensor):
        return Slot(path), [value]
    if isinstance(value, PLAIN):
        return Kept(value), []
    nest = opened(value)
    if nest is None:
        raise TypeError(f"a {type(value).__name__}, which is neither a tensor nor a tuple, list or dict of such")
    parts, tensors = [], []
    for key, one in zip(nest.keys, nest.parts):
        part, found = apart(one, (*path, str(key)))
        parts.append(part)
        tensors += found
    return nest._replace(parts=tuple(parts)), tensors


def together(shape: Any, tensors: List[Tensor]) -> Any:
    """The inverse: takes the tensors from the front of the list."""
    if isinstance(shape, Slot):
        return tensors.pop(0)
    if isinstance(shape, Kept):
        return shape.value
    return closed(shape._replace(parts=tuple(together(part, tensors) for part in shape.parts)))


def paths(shape: Any) -> List[Tuple[str, ...]]:
    """Where the tensors of a shape stand, in their order."""
    if isinstance(shape, Slot):
        return [shape.path]
    return [path for part in shape.parts for path in paths(part)] if isinstance(shape, Nest) else []


def names(name: str, shape: Any) -> List[str]:
    """A name for each tensor of a value of this name: its own, if it is a tensor."""
    return [".".join((name, *path)) for path in paths(shape)]
