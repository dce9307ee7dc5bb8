"""Whether the files of data are those that their manifest describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.progress import shown
from megatron_ext.data.indexed_dataset import data_file


def hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of files by suffix; shows progress on stderr."""
    with shown("hashing the data", sum(path.stat().st_size for path in files.values()), stays=False) as show:
        return {suffix: show.sha256(path) for suffix, path in files.items()}


def unchanged(sha256: Mapping[str, str], prefix: Path) -> bool:
    """Whether the files `<prefix><suffix>` are there and have these hashes, by suffix."""
    files = {suffix: data_file(prefix, suffix) for suffix in sha256}
    return all(path.is_file() for path in files.values()) and hashes(files) == sha256


def require_unchanged(sha256: Mapping[str, str], prefix: Path) -> None:
    """Raises DataPrepError unless `unchanged`."""
    if not unchanged(sha256, prefix):
        raise DataPrepError(f"{prefix}: the files are not those that the manifest describes; prepare them again")
