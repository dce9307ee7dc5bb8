"""Rows of Parquet files: the text in one column, without the others, or whole rows as JSON; a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import BadDocument, DataPrepError, missing_package
from data_prep.files.archives import unreadable

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

ROWS = 16
"""Rows in memory at once: a small file may hold the same large text in every row."""


def rows(path: Path, column: str | None, first: int, largest: int) -> Iterator[tuple[int, bytes, int]]:
    """Number (from 0), text in UTF-8, and bytes of the file up to there, of each row from `first` on.

    Without a column the text is the row as a JSON object. Groups of rows before it are not read.

    Raises:
        DataPrepError: the file cannot be read, is damaged, or has no such column of text.
        BadDocument: a row has no text, or more than `largest` bytes of it.
    """
    file, errors = _opened(path)
    with file:
        try:
            yield from _rows(file, path, column, first, largest)
        except errors as error:
            raise _damaged(path, error) from error


def _opened(path: Path) -> tuple[ParquetFile, tuple[type[Exception], ...]]:
    """The file, and what pyarrow raises where it is damaged."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise missing_package("pyarrow", "to read Parquet files") from error
    errors = (ArrowException, OSError, ValueError)
    try:
        return ParquetFile(path.open("rb")), errors
    except OSError as error:
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _damaged(path, error) from error
    except errors as error:
        raise _damaged(path, error) from error


def _rows(
    file: ParquetFile, path: Path, column: str | None, first: int, largest: int
) -> Iterator[tuple[int, bytes, int]]:
    within = [] if column is None else _path_to_text(file, path, column)[1:]
    size, total = path.stat().st_size, max(file.metadata.num_rows, 1)
    begin = 0
    for group in range(file.metadata.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        number = begin
        if first < end:
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=column and [column], use_threads=False):
                texts = _inner(batch.column(0), within)
                for place in range(len(batch)):
                    if number >= first:
                        content = _text(texts[place], number, column) if column else _row(batch, place)
                        if len(content) > largest:
                            raise BadDocument(number, f"larger than a document may be ({largest} bytes)")
                        yield number, content, size * (number + 1) // total
                    number += 1
        begin = end


def _inner(column: Any, within: list[str]) -> Any:
    """What lies within a column under these names."""
    if not within:
        return column
    from pyarrow.compute import struct_field

    return struct_field(column, within)


def _text(value: Any, number: int, column: str) -> bytes:
    if not value.is_valid:
        raise BadDocument(number, f"{column!r} has no text in this row; choose another column with --key")
    return value.as_buffer().to_pybytes()


def _row(batch: RecordBatch, place: int) -> bytes:
    return json.dumps(batch.slice(place, 1).to_pylist()[0], default=str).encode()


def _path_to_text(file: ParquetFile, path: Path, column: str) -> list[str]:
    """The names down to this column, which may lie within another: `column.within`. Raises DataPrepError: a file
    without this column, or where it holds something else than text."""
    from pyarrow import types

    fields = {field.name: field.type for field in file.schema_arrow}
    names = [column] if column in fields else column.split(".")
    for place, name in enumerate(names):
        if name not in fields:
            found = ", ".join(map(repr, fields)) or "none"
            where = f", in which {name!r} is missing" if place else ""
            raise DataPrepError(f"{path}: no column {column!r}{where}; its columns are {found}; choose one with --key")
        kind = fields[name]
        fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataPrepError(f"{path}: the column {column!r} is not text, but {kind}; choose another with --key")
    return names


def _damaged(path: Path, error: Exception) -> DataPrepError:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DataPrepError(f"{path}: not a Parquet file, or damaged ({why}); get it again")
