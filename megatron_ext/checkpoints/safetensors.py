"""Files of named tensors in the safetensors format.

A little-endian u64 with the length of the header; the header, JSON: by name `dtype`, `shape` and `data_offsets`
(from, to; bytes from the end of the header on), and strings under `__metadata__`; then the tensors, row-major.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import open_regular, why

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CRC32 = "crc32"
"""Of the bytes after the header, 8 hexadecimal digits under `__metadata__`; files by others do not have it."""
_LENGTH = struct.Struct("<Q")


def write(path: Path, tensors: Dict[str, Tensor], metadata: Dict[str, str]) -> None:
    """Writes tensors that lie on the CPU; the file appears only when complete and on the disk.

    Raises:
        EngineError: it cannot be written.
    """
    data = [(name, tensor.detach().contiguous().numpy().data.cast("B")) for name, tensor in tensors.items()]
    check, end = 0, 0
    entries: Dict[str, Any] = {}
    for name, content in data:
        check = zlib.crc32(content, check)
        entries[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + len(content)],
        }
        end += len(content)
    header = json.dumps({"__metadata__": dict(metadata, **{CRC32: f"{check:08x}"}), **entries}).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            with partial.open("wb") as file:
                file.write(_LENGTH.pack(len(header)) + header)
                for _, content in data:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            if partial.exists():
                partial.unlink()
    except OSError as error:
        raise EngineError(f"{path}: cannot be written: {error}") from error


def read(path: Path) -> Dict[str, Tensor]:
    """The tensors of a file by name.

    Raises:
        EngineError: it cannot be read or is damaged; the message has what was expected and what was found.
    """
    try:
        with open_regular(path) as (file, size):
            content = bytearray(size)
            file.readinto(content)  # type: ignore[attr-defined]
    except (OSError, MemoryError) as error:
        raise EngineError(f"{path}: cannot be read: {why(error) or 'more than the memory holds'}") from error
    header, start = _header(path, content)
    metadata = header.pop("__metadata__", None)
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    end = start + max((entry[3] for entry in entries.values()), default=0)
    if len(content) != end:
        raise EngineError(f"{path}: damaged: expected {end} bytes, found {len(content)}")
    expected = metadata.get(CRC32) if isinstance(metadata, dict) else None
    found = f"{zlib.crc32(memoryview(content)[start:]):08x}"
    if expected is not None and expected != found:
        raise EngineError(f"{path}: damaged: expected the CRC-32 {expected} after the header, found {found}")
    return {
        name: torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
        for name, (dtype, shape, begin, _, count) in entries.items()
    }


def metadata(path: Path) -> Dict[str, str]:
    """The strings that a file has beside its tensors.

    Raises:
        EngineError: as `read`, of the header.
    """
    found = _header_of(path).get("__metadata__")
    return found if isinstance(found, dict) else {}


def names(path: Path) -> List[str]:
    """Of the tensors in a file; raises as `metadata`."""
    return [name for name in _header_of(path) if name != "__metadata__"]


def _header_of(path: Path) -> Dict[str, Any]:
    """Read without the tensors."""
    try:
        with open_regular(path) as (file, size):
            content = bytearray(file.read(_LENGTH.size))
            length = _LENGTH.unpack_from(content)[0] if len(content) == _LENGTH.size else 0
            content += file.read(min(length, size))
    except (OSError, MemoryError) as error:
        raise EngineError(f"{path}: cannot be read: {why(error) or 'more than the memory holds'}") from error
    return _header(path, content)[0]


def _header(path: Path, content: bytearray) -> Tuple[Dict[str, Any], int]:
    """The header and where the data begin."""
    length: Optional[int] = _LENGTH.unpack_from(content)[0] if len(content) >= _LENGTH.size else None
    if length is None or length > len(content) - _LENGTH.size:
        raise EngineError(
            f"{path}: not a safetensors file, or damaged: expected a header of {length or 'some'} bytes, found a file "
            f"of {len(content)}"
        )
    start = _LENGTH.size + length
    try:
        header = json.loads(bytes(content[_LENGTH.size : start]))
    except ValueError as error:
        raise EngineError(
            f"{path}: not a safetensors file, or damaged: expected a JSON header, found {error}"
        ) from error
    if not isinstance(header, dict):
        raise EngineError(f"{path}: damaged: expected a JSON object as header, found {type(header).__name__}")
    return header, start


def _entry(path: Path, name: str, entry: Any) -> Tuple[torch.dtype, List[int], int, int, int]:
    """Number format, shape, first and last offset, and number of elements of a tensor."""
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        count = 1
        for size in shape:
            count *= size
        sound = begin >= 0 and end - begin == count * torch.empty(0, dtype=dtype).element_size()
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path}: damaged: tensor {name} is described by {entry!r}: {error!r}") from error
    if not sound:
        raise EngineError(
            f"{path}: damaged: tensor {name}: expected as many bytes as its shape has, found {begin} to {end}"
        )
    return dtype, shape, begin, end, count
