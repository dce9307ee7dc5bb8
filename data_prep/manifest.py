"""What lies beside indexed data and says where they came from: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.errors import DataPrepError
from megatron_ext.indexed_dataset import data_file

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Source, tokeniser, counts and hashes of indexed data."""

    version: int = VERSION
    source: str
    tokenizer: str
    vocab_size: int
    end_of_document: int
    documents: int
    tokens: int
    sha256: dict[str, str]
    """Of the `.bin` and the `.idx` file, by suffix."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_manifest(prefix: Path) -> Manifest | None:
    """The manifest of indexed data, or None where there is none, as with data that others made.

    Raises:
        DataPrepError: it is there but cannot be understood.
    """
    path = data_file(prefix, ".json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataPrepError(f"{path}: not a manifest of indexed data ({error}); delete it, or prepare anew") from error
    if manifest.version != VERSION:
        raise DataPrepError(f"{path}: version {manifest.version} of the manifest, but only {VERSION} is known")
    return manifest


def hashes(prefix: Path) -> dict[str, str]:
    """SHA-256 of both files, by suffix."""
    found = {}
    for suffix in (".bin", ".idx"):
        with data_file(prefix, suffix).open("rb") as file:
            found[suffix] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
