"""The format torch_dist of megatron.core's dist_checkpointing: a folder of torch.distributed.checkpoint.

`metadata.json` names the format. `.metadata`, a pickle, has of each tensor its whole shape and its chunks: where they
lie in it, and in which file. `common.pt` has what every rank shares. Nothing that a pickle names is called here.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import read_json, read_regular, why

if TYPE_CHECKING:
    from torch import Tensor

METADATA, FORMAT, COMMON = ".metadata", "metadata.json", "common.pt"
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron-LM's file that names the checkpoint of a folder, and what it says of one with weights alone."""
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
"""torch's names of storages, and of their numbers."""


class Chunk(NamedTuple):
    """A part of a tensor, in bytes `begin` to `begin + length` of a file."""

    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    file: Path
    begin: int
    length: int


class Stored(NamedTuple):
    """A tensor of a folder."""

    shape: Tuple[int, ...]
    chunks: List[Chunk]


def folder_of(path: Path) -> Path:
    """The folder of the checkpoint that `path` names: itself, or the one of which Megatron-LM's tracker tells."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    try:
        name = read_regular(tracker).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        raise EngineError(f"{tracker}: cannot be read: {why(error)}") from error
    if name != RELEASE and not name.isdigit():
        raise EngineError(f"{tracker}: expected {RELEASE} or the number of an iteration, found {name[:80]!r}")
    return path / (name if name == RELEASE else f"iter_{int(name):07d}")


def is_torch_dist(path: Path) -> bool:
    """Whether this is such a folder, or one in which Megatron-LM saved."""
    return path.is_dir() and any((path / name).is_file() for name in (TRACKER, METADATA, FORMAT))


def read_index(path: Path) -> Dict[str, Stored]:
    """The tensors of a folder by name, without their numbers; needs no torch. Raises EngineError: it is of another
    format, or its index cannot be read or does not fit its files."""
    folder = folder_of(path)
    _check_format(folder)
    index = folder / METADATA
    try:
        found = _Records(io.BytesIO(read_regular(index))).load()
        files = {(key.fqn, key.offset): one for key, one in found.storage_data.items() if hasattr(key, "offset")}
        stored = {
            name: Stored(
                _numbers(one.size),
                [
                    Chunk(
                        _numbers(chunk.offsets),
                        _numbers(chunk.sizes),
                        _beside(folder, files[name, chunk.offsets].relative_path),
                        *_numbers((files[name, chunk.offsets].offset, files[name, chunk.offsets].length)),
                    )
                    for chunk in one.chunks
                ],
            )
            for name, one in found.state_dict_metadata.items()
            if hasattr(one, "chunks")
        }
    except Exception as error:  # a pickle that is damaged raises almost anything
        raise EngineError(f"{index}: cannot be read as torch.distributed.checkpoint's index: {why(error)}") from error
    for name, one in stored.items():
        for chunk in one.chunks:
            if not chunk.file.is_file() or chunk.file.stat().st_size < chunk.begin + chunk.length:
                raise EngineError(f"{chunk.file}: missing or too short for the tensor {name}")
    return stored


def read(name: str, stored: Stored, at: Sequence[int] = ()) -> Tensor:
    """A tensor in fp32; `at` are the first indices of what is wanted of it. Raises EngineError: a chunk is damaged, or
    chunks do not cover it."""
    import torch

    whole = torch.zeros(stored.shape[len(at) :])
    filled = 0
    for chunk in stored.chunks:
        inside = [number - begin for number, begin in zip(at, chunk.offsets)]
        if not all(0 <= number < size for number, size in zip(inside, chunk.sizes)):
            continue
        part = _chunk(name, chunk)[tuple(inside)]
        offsets = chunk.offsets[len(at) :]
        whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape))] = part
        filled += part.numel()
    if filled != whole.numel():
        raise EngineError(f"tensor {name}: its chunks have {filled} of {whole.numel()} numbers")
    return whole


def _chunk(name: str, chunk: Chunk) -> Tensor:
    """A chunk, which is what torch.save writes of a tensor."""
    try:
        with chunk.file.open("rb") as file:
            file.seek(chunk.begin)
            content = file.read(chunk.length)
        with _Saved(content) as saved:
            return saved.tensor(saved.content).reshape(chunk.sizes)
    except Exception as error:  # what is damaged raises almost anything
        raise EngineError(f"{chunk.file}: tensor {name} cannot be read there: {why(error)}") from error


def read_common(path: Path) -> Dict[str, Any]:
    """What all ranks of a folder share: tensors of one number are numbers, anything but Python's own values has what it
    was made of as attributes. Raises EngineError: it is not there, or cannot be read."""
    file = folder_of(path) / COMMON
    try:
        with _Saved(read_regular(file)) as saved:
            return {str(key): saved.plain(value) for key, value in saved.content.items()}
    except Exception as error:  # what is damaged raises almost anything
        raise EngineError(
            f"{file}: cannot be read as what Megatron-Core's ranks share: {why(error)}; {weights_alone(path)}"
        ) from error


def weights_alone(path: Path) -> str:
    """What helps where all but the weights of a folder is missing or damaged."""
    return f"a run of the same model with train.load={path} takes the weights alone"


class _Saved:
    """What torch.save writes: a zip file with a pickle of its form, and the numbers of its tensors."""

    def __init__(self, content: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(content))
        [form] = [one for one in self._archive.namelist() if one.endswith("/data.pkl")]
        self._data = f"{form[: -len('data.pkl')]}data/"
        self.content = _Records(io.BytesIO(self._archive.read(form))).load()

    def __enter__(self) -> _Saved:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def tensor(self, record: _Record) -> Tensor:
        import torch

        made = record.made_of
        while isinstance(made[0], _Record):  # a parameter is made of a tensor
            made = made[0].made_of
        (_, kind, key, *_), offset, size, stride = made[:4]
        numbers = torch.frombuffer(
            bytearray(self._archive.read(f"{self._data}{key}")), dtype=getattr(torch, _STORAGES[kind.__name__])
        )
        return numbers.as_strided(size, stride, offset)

    def plain(self, value: Any) -> Any:
        """The same with the numbers of tensors that have one."""
        if isinstance(value, dict):
            return {key: self.plain(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(one) for one in value]
        if type(value).__name__ == "_rebuild_tensor_v2" and value.made_of[2] in ((), (1,)):
            return self.tensor(value).item()
        return value


class Written(NamedTuple):
    """A chunk to be written: of which tensor, where it lies in its whole shape, and how it is got."""

    name: str
    shape: Tuple[int, ...]
    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    tensor: Callable[[], Tensor]


def write(folder: Path, chunks: Sequence[Written], objects: Sequence[str], common: Dict[str, Any]) -> None:
    """Writes fp32 tensors into `folder`, which is there and empty. Each is asked for when its turn comes.

    `objects` are names under which there is nothing, and `common` is what every rank is to know.

    Raises:
        EngineError: this torch cannot write it.
        OSError: it cannot be written.
    """
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    if not hasattr(dcp, "save"):
        raise EngineError(
            f"torch {torch.__version__} does not write the format torch_dist alone; use torch 2.2 or newer"
        )
    keys: Dict[Tuple[str, Any], Written] = {(one.name, torch.Size(one.offsets)): one for one in chunks}

    def item(one: Written) -> WriteItem:
        place = ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes))
        data = TensorWriteData(place, TensorProperties(torch.float32), torch.Size(one.shape))
        return WriteItem(MetadataIndex(one.name, one.offsets), WriteItemType.SHARD, tensor_data=data)

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            nothing = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
            self.plan = SavePlan([*map(item, chunks), *nothing], planner_data={})
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.type == WriteItemType.BYTE_IO:
                torch.save([None], content := io.BytesIO())
                return content
            one = keys[write_item.index.fqn, write_item.index.offset]
            return one.tensor().reshape(one.sizes).contiguous()

    try:
        with warnings.catch_warnings():  # of a process that has no others
            warnings.simplefilter("ignore")
            dcp.save({}, storage_writer=FileSystemWriter(folder), planner=Planner())
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    torch.save(common, folder / COMMON)
    (folder / FORMAT).write_text(json.dumps(_CONFIG), encoding="utf-8")


def _check_format(folder: Path) -> None:
    """Raises EngineError if a folder says that it is of another format."""
    path = folder / FORMAT
    if not (folder / METADATA).is_file():
        raise EngineError(
            f"{folder}: has no {METADATA}, so it is not of Megatron-Core's format torch_dist (--ckpt-format torch_dist)"
        )
    if not path.is_file():
        return
    content = read_json(path, EngineError)
    said = content.get("sharded_backend") if isinstance(content, dict) else None
    if said != "torch_dist":
        raise EngineError(f"{path}: expected the format torch_dist, found {said!r}; save it as torch_dist")


class _Record:
    """Anything that a pickle makes, with what it was made of."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})

    def __setitem__(self, *_: Any) -> None:
        """Nothing: what a container such as a defaultdict holds is not kept."""

    append = extend = __setitem__


_KNOWN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Records(pickle.Unpickler):
    """Makes records of everything but shapes and dictionaries, so that nothing in a pickle is called."""

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name)) or type(name, (_Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid  # of a storage: where its numbers are


def _numbers(sizes: Any) -> Any:
    """These sizes, which must be numbers."""
    if not isinstance(sizes, tuple) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"expected sizes, found {sizes!r:.80}")
    return sizes


def _beside(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r:.80} is not a file in its folder")
    return folder / name
