"""The files in which others publish a model's weights: one of safetensors, or shards and an index that has each
tensor's. It needs Python alone.

The index, model.safetensors.index.json, has `weight_map`: by tensor, the shard's name beside it.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, Tuple

from megatron_ext.checkpoints.header import read_header
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_regular, why

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""In folders that have no safetensors."""


def is_published(path: Path) -> bool:
    """Whether this is a folder or a file of weights that others saved."""
    if path.is_dir():
        return any((path / name).is_file() for name in (WHOLE, INDEX, *PICKLED))
    return path.name in (WHOLE, INDEX) and path.is_file()


def tensors_of(source: Path) -> Dict[str, Path]:
    """The file of each tensor, by the files' headers, which are sound. Raises EngineError: there are none, one is
    missing or damaged, or index and shards do not fit together."""
    path = chosen(source)
    if not path.name.endswith(".index.json"):
        found = dict.fromkeys(read_header(path).entries, path)
        if not found:
            raise EngineError(f"{path}: has no tensors")
        return found
    places = _shards_of(path)
    held: Dict[str, str] = {}
    for name in sorted(set(places.values())):
        for tensor in read_header(path.parent / name).entries:
            if tensor in held:
                raise EngineError(f"{path}: the tensor {tensor} is in two shards, {held[tensor]} and {name}")
            if places.get(tensor) != name:
                where = f"says that it is in {places[tensor]}" if tensor in places else "does not list it"
                raise EngineError(f"{path}: the tensor {tensor} is in {name}, but the index {where}")
            held[tensor] = name
    for tensor, name in places.items():
        if tensor not in held:
            raise EngineError(f"{path}: the tensor {tensor} should be in {name}, which does not have it")
    return {tensor: path.parent / name for tensor, name in held.items()}


def chosen(source: Path) -> Path:
    """The file or the index of a folder, in which one whole file goes before shards, as in transformers. Raises
    EngineError: there is none."""
    if not source.is_dir():
        return source
    for name in (WHOLE, INDEX):
        if (source / name).is_file():
            return source / name
    found = sorted(path.name for path in source.iterdir())
    told = f"{source}: expected {WHOLE} or {INDEX}, found {', '.join(found[:10]) or 'an empty folder'}"
    if any(name in found for name in PICKLED):
        told += "; reading a .bin can run any code, so save the weights as safetensors, with save_pretrained"
    raise EngineError(told)


def _shards_of(index: Path) -> Dict[str, str]:
    """The name of each tensor's shard; all shards are there. Raises EngineError: the index cannot be read, or some
    shards are not there."""
    places = _weight_map(index)
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        told = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise EngineError(f"{index}: {len(missing)} of its {len(names)} shards are not there: {told}")
    return places


def _weight_map(index: Path) -> Dict[str, str]:
    """The shard of each tensor."""
    try:
        content = json.loads(read_regular(index), object_pairs_hook=lambda pairs: _object(index, pairs))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{index}: cannot be read: {why(error)}") from error
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
