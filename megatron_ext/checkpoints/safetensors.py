"""Files of named tensors in the safetensors format (`header.py` describes it)."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor

from megatron_ext.checkpoints.header import CRC32, Header, packed, parsed, read_header
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


def encoded(tensors: Dict[str, Tensor], metadata: Dict[str, str]) -> List[Any]:
    """The bytes of a file of tensors that lie on the CPU, in pieces: its header, then each tensor's own memory."""
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
    return [packed(entries, {**metadata, CRC32: f"{check:08x}"}), *(content for _, content in data)]


def write(path: Path, tensors: Dict[str, Tensor], metadata: Dict[str, str]) -> None:
    """Writes tensors that lie on the CPU; the file appears only when complete and on the disk. Raises EngineError: it
    cannot be written."""
    pieces = encoded(tensors, metadata)
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            if partial.exists():
                partial.unlink()
    except OSError as error:
        raise EngineError(f"{path}: cannot be written: {error}") from error


def read(path: Path, require: Callable[[Header], None] = lambda header: None) -> Dict[str, Tensor]:
    """The tensors of a file by name; `require` raises EngineError if the header is not the one that is wanted. Raises
    EngineError: it cannot be read or is damaged; the message has what was expected and what was found."""
    try:
        with open_regular(path) as (file, size):
            content = bytearray(size)
            file.readinto(content)  # type: ignore[attr-defined]
    except (OSError, MemoryError) as error:
        raise EngineError(f"{path}: cannot be read: {why(error) or 'more than the memory holds'}") from error
    return decoded(path, content, require)


def decoded(path: Path, content: bytearray, require: Callable[[Header], None]) -> Dict[str, Tensor]:
    """The tensors in the bytes of a file, of which messages say `path`; raises as `read`."""
    header = parsed(path, content, len(content))
    require(header)
    _require_sum(path, header, zlib.crc32(memoryview(content)[header.start :]))
    return {
        name: torch.frombuffer(
            content, dtype=DTYPES[entry.dtype], count=entry.numbers, offset=header.start + entry.begin
        ).view(entry.shape)
        if entry.numbers
        else torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for name, entry in header.entries.items()
    }


def _require_sum(path: Path, header: Header, check: int) -> None:
    expected, found = header.metadata.get(CRC32), f"{check:08x}"
    if expected is not None and expected != found:
        raise EngineError(f"{path}: damaged: expected the CRC-32 {expected} after the header, found {found}")


def check_sum(path: Path, header: Header) -> None:
    """Reads a file that has a checksum, a part at a time; raises as `read`."""
    check = 0
    if CRC32 in header.metadata:
        try:
            with open_regular(path) as (file, _):
                file.seek(header.start)
                while part := file.read(2**24):
                    check = zlib.crc32(part, check)
        except OSError as error:
            raise EngineError(f"{path}: cannot be read: {why(error)}") from error
        _require_sum(path, header, check)


def metadata(path: Path) -> Dict[str, str]:
    """The strings that a file has beside its tensors; raises as `read`, but for the tensors."""
    return read_header(path).metadata
