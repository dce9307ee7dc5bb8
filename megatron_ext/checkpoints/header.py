"""The header of a safetensors file, read without its tensors, and what a part of a checkpoint says there of itself.

A file is the length of the header, a little-endian u64; the header, JSON: by name `dtype`, `shape` and `data_offsets`
(from, to; bytes from the end of the header on), and strings under `__metadata__`; then the tensors, row-major.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Union

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import content_of, open_regular, why

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a number, by its format."""
CRC32 = "crc32"
"""The checksum of the bytes after the header, 8 hexadecimal digits under `__metadata__`; files by others do not have
it."""
PART, ITERATION = "part", "iteration"
"""Under `__metadata__`: which part of a checkpoint the file is, and of which iteration."""
LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_MOST_BYTES = 100 << 20
"""The most bytes of a header, as in the library of the format's authors."""


class Entry(NamedTuple):
    """A tensor in the file; `begin` and `end` count from the end of the header."""

    dtype: str
    shape: List[int]
    begin: int
    end: int
    numbers: int
    """In it."""


class Header(NamedTuple):
    """What stands before the tensors."""

    entries: Dict[str, Entry]
    metadata: Dict[str, str]
    start: int
    """The length of the tensors, in bytes."""
    bytes: int
    """That the file must have."""
    digest: str
    """The digest of the header and its length, by which meta.json knows it: BLAKE2b, 16 bytes."""


def digest_of(content: Union[bytes, bytearray]) -> str:
    """BLAKE2b, 16 bytes, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_header(path: Path) -> Header:
    """Reads the header of a file that has as many bytes as it says. Raises EngineError: it cannot be read, or is
    damaged; the message has what was expected and what was found."""
    try:
        with open_regular(path) as (file, size):
            content = file.read(LENGTH.size)
            length = LENGTH.unpack(content)[0] if len(content) == LENGTH.size else 0
            content += content_of(file, min(length, size, _MOST_BYTES))
    except (OSError, MemoryError) as error:
        raise EngineError(f"{path}: cannot be read: {why(error) or 'more than the memory holds'}") from error
    return parsed(path, content, size)


def parsed(path: Path, content: Union[bytes, bytearray], size: int) -> Header:
    """The header at the beginning of `content`, of a file of so many bytes; raises as `read_header`."""
    length: Optional[int] = LENGTH.unpack_from(content)[0] if len(content) >= LENGTH.size else None
    if length is None or length > min(len(content) - LENGTH.size, _MOST_BYTES):
        expected = f"a header of {length or 'some'} bytes"
        found = f"a file of {size}" if size else "an empty file"
        raise EngineError(f"{path}: not a safetensors file, or damaged: expected {expected}, found {found}")
    start = LENGTH.size + length
    try:
        header = json.loads(content[LENGTH.size : start])
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{path}: not a safetensors file, or damaged: expected a JSON header, found {why(error)}"
        ) from error
    if not isinstance(header, dict):
        raise EngineError(f"{path}: damaged: expected a JSON object as header, found {type(header).__name__}")
    metadata = header.pop(_METADATA, None)
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    end = start + max((entry.end for entry in entries.values()), default=0)
    if size != end:
        raise EngineError(f"{path}: damaged: expected {end} bytes, found {size}")
    return Header(entries, metadata if isinstance(metadata, dict) else {}, start, end, digest_of(content[:start]))


def packed(entries: Dict[str, Any], metadata: Dict[str, str]) -> bytes:
    """A header and its length, as they stand in a file; `entries` are JSON's."""
    header = json.dumps({_METADATA: metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return LENGTH.pack(len(header)) + header


def _entry(path: Path, name: str, entry: Any) -> Entry:
    if isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and entry["dtype"] not in BYTES:
        raise EngineError(
            f"{path}: tensor {name} has the number format {entry['dtype']:.20}, and {', '.join(BYTES)} can be read; "
            "save quantized weights as BF16 or F32"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        count = 1
        for size in shape:
            count *= size
        numbers = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        sound = numbers and end - begin == count * BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path}: damaged: tensor {name} is described by {entry!r:.300}: {error!r:.300}") from error
    if not sound:
        raise EngineError(
            f"{path}: damaged: tensor {name}: expected as many bytes as its shape has, found {begin} to {end}"
        )
    return Entry(dtype, shape, begin, end, count)


def of_part(part: str, iteration: int) -> Dict[str, str]:
    """What a part says of itself under `__metadata__`."""
    return {PART: part, ITERATION: str(iteration)}


def require_part(path: Path, header: Header, part: str, iteration: int, digest: Optional[str]) -> None:
    """Whether this is the file of a part that a checkpoint of this iteration was saved with, by its header, which has
    the checksum of the tensors. `digest` is None of a checkpoint from before there was one, whose parts say nothing.

    Raises:
        EngineError: it is another one.
    """
    said = {key: header.metadata.get(key) for key in (PART, ITERATION)}
    if digest is None:
        if any(value is not None for value in said.values()):
            raise EngineError(
                f"{path}: damaged: it is newer than the meta.json beside it, which lacks what belongs to such a file"
            )
    elif said != of_part(part, iteration):
        raise EngineError(
            f"{path}: not of this checkpoint: expected {part} of iteration {iteration}, found {said[PART]} of "
            f"iteration {said[ITERATION]}"
        )
    elif header.digest != digest:
        raise EngineError(
            f"{path}: not the file that this checkpoint was saved with: meta.json expects a header with the checksum "
            f"{digest}, found {header.digest}"
        )


def part_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def part_name(block: str) -> str:
    """The part that holds a block: `layer-00007` for `layers.7`, `decoder-00003` for `decoder.3`."""
    stem, _, number = block.rpartition(".")
    if not (stem and number.isdigit()):
        return block
    return f"{'layer' if stem == 'layers' else stem}-{int(number):05d}"


_ISLAND = ".island-"


def island_part(part: str, island: int) -> str:
    """The part that holds what an island has for itself; that of the first one is in the block's own part."""
    return f"{part}{_ISLAND}{island:05d}" if island else part


def parts_of_islands(parts: Sequence[str], islands: int) -> List[str]:
    """The parts of all islands."""
    return [island_part(part, island) for island in range(islands) for part in parts]


def islands_of(parts: Iterable[str]) -> int:
    """How many islands a checkpoint with these parts has; 1 for a run without islands."""
    return 1 + len({part.rpartition(_ISLAND)[2] for part in parts if _ISLAND in part})


def part_names(layers: int) -> List[str]:
    """All parts of a GPT model."""
    return ["embedding", *(part_name(f"layers.{number}") for number in range(layers)), "head"]
