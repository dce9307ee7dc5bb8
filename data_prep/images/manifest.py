"""What lies beside prepared images and says what they are: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from conf.run_folder.json_values import Count
from data_prep.kinds import IMAGES, MADE_BY, VERSION


@dataclass(frozen=True, kw_only=True)
class Split:
    images: Count


@dataclass(frozen=True, kw_only=True)
class ImagesManifest:
    """Classes, sizes and hashes of images."""

    version: Count = VERSION
    kind: str = IMAGES
    classes: tuple[str, ...]
    """Names; a label is the place of one here."""
    height: Count
    width: Count
    channels: Count
    mean: tuple[float, ...]
    """Of the training pixels, from 0 to 1, by channel."""
    std: tuple[float, ...]
    splits: dict[str, Split]
    made_by: str = MADE_BY[IMAGES]
    corpus: str
    """Where the images came from, for people."""
    sha256: dict[str, str]
    """Of the files beside this one, by suffix."""

    def to_json(self, recipe: dict[str, Any]) -> str:
        """With all that the data follow from: data of the same recipe are the same."""
        return json.dumps({**asdict(self), "recipe": recipe}, indent=1) + "\n"
