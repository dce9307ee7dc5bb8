"""What prepared data are: text, pairs or images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import RunFolderError
from conf.run_folder.json_values import typed
from data_prep.errors import DataPrepError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.data.indexed_dataset import data_file

T = TypeVar("T")
TEXT = "text"
PAIRS = "pairs"
IMAGES = "images"
MADE_BY = {TEXT: "tdpp data prepare", PAIRS: "tdpp data pairs", IMAGES: "tdpp data images"}
VERSION = 1
"""Of the manifests of pairs and images."""


def kind_of(prefix: Path) -> str:
    """What the manifest of data says that they are; text, where there is none or one of text.

    Whoever opens the data says what is wrong with them.
    """
    try:
        content = json.loads(read_regular(data_file(prefix, ".json")))
    except (OSError, ValueError, RecursionError):
        return TEXT
    kind = content.get("kind") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) and kind in MADE_BY else TEXT


def read_described(prefix: Path, manifest: type[T]) -> T:
    """The manifest of pairs or images.

    Raises:
        DataPrepError: it is not there, or cannot be understood.
    """
    path = data_file(prefix, ".json")
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataPrepError(f"{path}: cannot be read ({why(error)}); prepare the data anew") from error
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(content, dict) and version != VERSION:
        raise DataPrepError(
            f"{path}: version {version} of the manifest, but only {VERSION} is known; prepare the data anew"
        )
    try:
        return typed(manifest, content, str(path))
    except RunFolderError as error:
        raise DataPrepError(f"{error}; prepare the data anew") from error


def recipe_of(prefix: Path) -> Any:
    """The recipe in the manifest of data; None where there is none to be read."""
    try:
        return json.loads(read_regular(data_file(prefix, ".json"))).get("recipe")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
