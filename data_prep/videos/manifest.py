"""What lies beside prepared videos and says what they are: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from conf.run_folder.json_values import Count
from data_prep.kinds import MADE_BY, VERSION, VIDEOS


@dataclass(frozen=True, kw_only=True)
class Split:
    videos: Count
    captions: Count
    longest: Count
    """Words of a caption."""


@dataclass(frozen=True, kw_only=True)
class VideosManifest:
    """Sizes and hashes of videos."""

    version: Count = VERSION
    kind: str = VIDEOS
    features: Count
    """Numbers that describe a frame."""
    vocab_size: Count
    unknown: Count
    """Words of all captions that are not in the vocabulary."""
    synthetic: bool
    """Whether nobody has filmed them."""
    splits: dict[str, Split]
    made_by: str = MADE_BY[VIDEOS]
    corpus: str
    """Where the videos came from, for people."""
    sha256: dict[str, str]
    """Of the files beside this one, by suffix."""

    def to_json(self, recipe: dict[str, Any]) -> str:
        """With all that the data follow from: data of the same recipe are the same."""
        return json.dumps({**asdict(self), "recipe": recipe}, indent=1) + "\n"
