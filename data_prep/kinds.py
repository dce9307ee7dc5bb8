"""What prepared data are: text, chats, pairs, images or videos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import ConfigError, RunFolderError
from conf.run_folder.json_values import Count, typed
from conf.schema.data import check_split
from data_prep.errors import DataPrepError
from data_prep.files.progress import unchanged
from megatron_ext.contract.files import read_json, read_regular
from megatron_ext.contract.models.model import CHATS, IMAGES, PAIRS, TEXT, VIDEOS, family_named
from megatron_ext.data.indexed_dataset import data_file

T = TypeVar("T")
M = TypeVar("M", bound="Described")
MADE_BY = {
    TEXT: "tdpp data prepare",
    CHATS: "tdpp data chats",
    PAIRS: "tdpp data pairs",
    IMAGES: "tdpp data images",
    VIDEOS: "tdpp data videos",
}
VERSION = 1
"""The version of the manifests of chats, pairs, images and videos."""


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
    return family_named(family).learns


def require_kind(prefix: Path, family: str, key: str) -> None:
    """Raises DataPrepError for data of another kind than a model of this family learns from."""
    found, wanted = kind_of(prefix), kind_for(family)
    if found == CHATS and family_named(family).running_text:
        return
    if found not in (None, wanted):
        raise DataPrepError(
            f"{key}={prefix} holds {found}, but model.family={family} learns from {wanted}; give data that "
            f"{MADE_BY[wanted]!r} made, or choose a model for {found}"
        )


def read_described(prefix: Path, manifest: type[T], known: int = VERSION) -> T:
    """The manifest of data, of the only version that is `known`. Raises DataPrepError: it is not there, or cannot be
    understood."""
    path = data_file(prefix, ".json")
    content = read_json(path, DataPrepError, way_out="prepare the data again")
    version = content.get("version", known) if isinstance(content, dict) else known
    if version != known:
        raise DataPrepError(
            f"{path}: version {version} of the manifest, but only {known} is supported; prepare the data again"
        )
    try:
        return typed(manifest, content, str(path))
    except RunFolderError as error:
        raise DataPrepError(f"{error}; prepare the data again") from error


def read_unchanged(prefix: Path, manifest: type[M]) -> M:
    """The manifest of chats, pairs, images or videos whose files are those that it describes. Raises DataPrepError:
    they are not, or as `read_described`."""
    found = read_described(prefix, manifest)
    require_unchanged(found.sha256, prefix)
    return found


def require_unchanged(sha256: Mapping[str, str], prefix: Path) -> None:
    """Raises DataPrepError unless `unchanged`."""
    if not unchanged(sha256, prefix):
        raise DataPrepError(f"{prefix}: the files are not those that the manifest describes; prepare them again")


def require_training_document(prefix: Path, kind: str, number: int, count: int) -> None:
    """Raises DataPrepError where the data have no training pair, image or video of this number."""
    if not 0 <= number < count:
        raise DataPrepError(f"--document {number}: {prefix} has the training {kind} 0 to {count - 1}")


def weights_of(split: str) -> list[float]:
    """Parses the weights of training, validation and test; raises DataPrepError for a text that is none."""
    try:
        check_split(split)
    except ConfigError as error:
        raise DataPrepError(str(error).replace("data.split=", "--split ", 1)) from error
    return [float(weight) for weight in split.split(",")]


@dataclass(frozen=True, kw_only=True)
class Described:
    """The manifest of chats, pairs, images or videos: `<prefix>.json` (docs/formats.md)."""

    version: Count = VERSION
    kind: str
    corpus: str
    """Where the data came from, for people."""
    sha256: dict[str, str]
    """Hashes of the files beside this one, by suffix."""

    def to_json(self, recipe: dict[str, Any]) -> str:
        """The text of the file; `recipe` is all that the data follow from: data of the same recipe are the same."""
        return json.dumps({**asdict(self), "made_by": MADE_BY[self.kind], "recipe": recipe}, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class ImagesSplit:
    images: Count


@dataclass(frozen=True, kw_only=True)
class ImagesManifest(Described):
    """Classes, sizes and hashes of images."""

    kind: str = IMAGES
    classes: tuple[str, ...]
    """Names; a label is the place of one here."""
    height: Count
    width: Count
    channels: Count
    mean: tuple[float, ...]
    """Means of the training pixels, from 0 to 1, by channel."""
    std: tuple[float, ...]
    splits: dict[str, ImagesSplit]


@dataclass(frozen=True, kw_only=True)
class VideosSplit:
    videos: Count
    captions: Count
    longest: Count
    """Words of a caption."""


@dataclass(frozen=True, kw_only=True)
class VideosManifest(Described):
    """Sizes and hashes of videos."""

    kind: str = VIDEOS
    features: Count
    """Numbers that describe a frame."""
    vocab_size: Count
    unknown: Count
    """Words of all captions that are not in the vocabulary."""
    synthetic: bool
    """Whether nobody has filmed them."""
    splits: dict[str, VideosSplit]


@dataclass(frozen=True, kw_only=True)
class ChatsManifest(Described):
    """Counts and hashes of conversations."""

    kind: str = CHATS
    conversations: Count
    tokens: Count
    answers: Count
    """Tokens that are to be learned."""
    longest: Count
    """Tokens of the longest conversation."""
    vocab_size: Count
    end_token: str
    """How the tokeniser beside the data calls the end of a text."""
    left_out: dict[str, Count]
    """How many conversations of the corpus are not in the data, by reason."""


@dataclass(frozen=True, kw_only=True)
class PairsSplit:
    """What one split's pairs hold."""

    pairs: Count
    source_tokens: Count
    target_tokens: Count
    longest: Count
    """Tokens of the longest sentence, of either language."""


@dataclass(frozen=True, kw_only=True)
class PairsManifest(Described):
    """Languages, counts and hashes of pairs."""

    kind: str = PAIRS
    source: str
    target: str
    vocab_size: Count
    splits: dict[str, PairsSplit]
    left_out: dict[str, Count]
    """How many pairs of the corpus are not in the data, by reason."""
    unknown: Count = 0
    """Tokens that the vocabulary lacks."""
