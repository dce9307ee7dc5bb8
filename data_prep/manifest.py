"""What lies beside indexed data and says where they came from: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_origin, get_type_hints

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
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _not_one(path, str(error)) from error
    if not isinstance(content, dict) or "version" not in content:
        raise _not_one(path, "it has no version")
    if content["version"] != VERSION:
        raise DataPrepError(
            f"{path}: version {content['version']} of the manifest, but only {VERSION} is known; prepare the data anew"
        )
    types = get_type_hints(Manifest)
    if content.keys() != types.keys():
        raise _not_one(path, f"its keys are {', '.join(content)} instead of {', '.join(types)}")
    for key, kind in types.items():
        if not isinstance(content[key], get_origin(kind) or kind):
            raise _not_one(path, f"{key} is {content[key]!r}")
    return Manifest(**content)


def _not_one(path: Path, why: str) -> DataPrepError:
    return DataPrepError(f"{path}: not a manifest of indexed data ({why}); prepare the data anew, or delete it")


def hashes(prefix: Path) -> dict[str, str]:
    """SHA-256 of both files, by suffix."""
    found = {}
    for suffix in (".bin", ".idx"):
        with data_file(prefix, suffix).open("rb") as file:
            found[suffix] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
