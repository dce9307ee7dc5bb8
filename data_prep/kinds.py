"""What prepared data are: text, pairs, images or videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import RunFolderError
from conf.run_folder.json_values import typed
from data_prep.errors import DataPrepError
from megatron_ext.contract.files import read_regular, why
from megatron_ext.contract.models.model import CAPTIONS, TRANSLATION
from megatron_ext.contract.models.model import IMAGES as CLASSIFIERS
from megatron_ext.data.indexed_dataset import data_file

T = TypeVar("T")
TEXT = "text"
PAIRS = "pairs"
IMAGES = "images"
VIDEOS = "videos"
MADE_BY = {
    TEXT: "tdpp data prepare",
    PAIRS: "tdpp data pairs",
    IMAGES: "tdpp data images",
    VIDEOS: "tdpp data videos",
}
VERSION = 1
"""Of the manifests of pairs, images and videos."""


def kind_of(prefix: Path) -> str | None:
    """What data are by their manifest, or by the index of text; None where neither says it.

    Whoever opens the data says what is wrong with them.
    """
    try:
        content = json.loads(read_regular(data_file(prefix, ".json")))
    except (OSError, ValueError, RecursionError):
        content = None
    kind = content.get("kind") if isinstance(content, dict) else None
    if isinstance(kind, str) and kind in MADE_BY:
        return kind
    return TEXT if data_file(prefix, ".idx").exists() else None


def kind_for(family: str) -> str:
    """What a model of this family learns from."""
    kinds = ((TRANSLATION, PAIRS), (CLASSIFIERS, IMAGES), (CAPTIONS, VIDEOS))
    return next((kind for families, kind in kinds if family in families), TEXT)


def require_kind(prefix: Path, family: str, key: str) -> None:
    """Raises DataPrepError for data of another kind than a model of this family learns from."""
    found, wanted = kind_of(prefix), kind_for(family)
    if found not in (None, wanted):
        raise DataPrepError(
            f"{key}={prefix} holds {found}, but model.family={family} learns from {wanted}; give data that "
            f"{MADE_BY[wanted]!r} made, or choose a model for {found}"
        )


def read_described(prefix: Path, manifest: type[T]) -> T:
    """The manifest of pairs, images or videos.

    Raises:
        DataPrepError: it is not there, or cannot be understood.
    """
    path = data_file(prefix, ".json")
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataPrepError(f"{path}: cannot be read ({why(error)}); prepare the data again") from error
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(content, dict) and version != VERSION:
        raise DataPrepError(
            f"{path}: version {version} of the manifest, but only {VERSION} is supported; prepare the data again"
        )
    try:
        return typed(manifest, content, str(path))
    except RunFolderError as error:
        raise DataPrepError(f"{error}; prepare the data again") from error


def recipe_of(prefix: Path) -> Any:
    """The recipe in the manifest of data; None where there is none to be read."""
    try:
        return json.loads(read_regular(data_file(prefix, ".json"))).get("recipe")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
