"""The tensors of a model that Hugging Face saved: in one file, or in shards and an index that has each tensor's.

The index, model.safetensors.index.json, has `weight_map`: by tensor, the shard's name beside it.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor

from megatron_ext.checkpoints import safetensors
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular
from megatron_ext.contract.models.pieces import Parameter

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read(source: Path) -> Tuple[Path, Dict[str, Tensor]]:
    """The tensors of `source` by name, and the file that stands for them in messages.

    `source` is a folder, in which one whole file goes before shards, as in transformers; or such a file, or an index.

    Raises:
        EngineError: there is none, a file cannot be read, or index and shards do not fit together.
    """
    path = _chosen(source)
    return path, _shards(path) if path.name.endswith(".index.json") else safetensors.read(path)


def _chosen(source: Path) -> Path:
    if not source.is_dir():
        return source
    for name in (WHOLE, INDEX):
        if (source / name).is_file():
            return source / name
    found = sorted(path.name for path in source.iterdir())
    raise EngineError(f"{source}: expected {WHOLE} or {INDEX}, found {', '.join(found[:10]) or 'an empty folder'}")


def _shards(index: Path) -> Dict[str, Tensor]:
    places = _weight_map(index)
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        told = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise EngineError(f"{index}: {len(missing)} of its {len(names)} shards are not there: {told}")
    tensors: Dict[str, Tensor] = {}
    held: Dict[str, str] = {}
    for name in names:
        for tensor, content in safetensors.read(index.parent / name).items():
            if tensor in held:
                raise EngineError(f"{index}: the tensor {tensor} is in two shards, {held[tensor]} and {name}")
            if places.get(tensor) != name:
                where = f"says that it is in {places[tensor]}" if tensor in places else "does not list it"
                raise EngineError(f"{index}: the tensor {tensor} is in {name}, but the index {where}")
            held[tensor], tensors[tensor] = name, content
    for tensor, name in places.items():
        if tensor not in held:
            raise EngineError(f"{index}: the tensor {tensor} should be in {name}, which does not have it")
    return tensors


def _weight_map(index: Path) -> Dict[str, str]:
    """The shard of each tensor."""
    try:
        content = json.loads(read_regular(index), object_pairs_hook=lambda pairs: _object(index, pairs))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{index}: cannot be read: {error}") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise EngineError(f"{index}: expected a JSON object with weight_map, the shard of each tensor; found none")
    for tensor, name in places.items():
        if not isinstance(name, str) or not _lies_beside(name):
            raise EngineError(f"{index}: the shard of tensor {tensor} is {name!r}, which is not a file in its folder")
    return places


def _lies_beside(name: str) -> bool:
    """A link there may lead elsewhere, as those of Hugging Face's cache do; its name may not."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _object(index: Path, pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """A JSON object; of a key given twice JSON would keep the last."""
    content: Dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise EngineError(f"{index}: {key} is there twice: {content[key]!r} and {value!r}")
        content[key] = value
    return content


class Twin(NamedTuple):
    """Says where a parameter of ours is there: in one tensor, or in several that lie one after another here."""

    names: Tuple[str, ...]
    transposed: bool = False
    """Whether it lies there as [inputs, outputs]."""

    def within(self, prefix: str) -> Twin:
        return self._replace(names=tuple(prefix + name for name in self.names))

    def theirs(self, tensor: Tensor, parameter: Parameter) -> Iterator[Tuple[str, Tensor]]:
        """Their tensors from ours."""
        lengths = self._lengths(len(tensor), parameter)
        for name, part in zip(self.names, torch.split(tensor, lengths)):
            yield name, part.t() if self.transposed else part

    def ours(self, path: Path, found: Dict[str, Tensor], parameter: Parameter) -> Tensor:
        """Ours, in fp32, from theirs in `path`.

        Raises:
            EngineError: one is missing, or has another shape.
        """
        parts = []
        for name, length in zip(self.names, self._lengths(parameter.shape[0], parameter)):
            wanted = [length, *parameter.shape[1:]]
            tensor = taken(path, found, name)
            there = wanted[::-1] if self.transposed else wanted
            if list(tensor.shape) != there:
                raise EngineError(f"{path}: expected {name} of shape {there}, found {list(tensor.shape)}")
            parts.append((tensor.t() if self.transposed else tensor).float())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _lengths(self, rows: int, parameter: Parameter) -> List[int]:
        """Rows of each of theirs, of so many together."""
        pieces = parameter.pieces
        return [rows] if len(self.names) == 1 else [rows * piece // sum(pieces) for piece in pieces]


def taken(path: Path, tensors: Dict[str, Tensor], name: str) -> Tensor:
    """The tensor of this name; raises EngineError if there is none."""
    if name not in tensors:
        raise EngineError(f"{path}: expected a tensor {name}, found {len(tensors)} others")
    return tensors[name]
