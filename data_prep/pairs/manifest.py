"""What lies beside prepared pairs and says what they are: `<prefix>.json` (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from conf.run_folder.json_values import Count
from data_prep.kinds import MADE_BY, PAIRS, VERSION


@dataclass(frozen=True, kw_only=True)
class Split:
    """Of one split's pairs."""

    pairs: Count
    source_tokens: Count
    target_tokens: Count
    longest: Count
    """Tokens of the longest sentence, of either language."""


@dataclass(frozen=True, kw_only=True)
class PairsManifest:
    """Languages, counts and hashes of pairs."""

    version: Count = VERSION
    kind: str = PAIRS
    source: str
    target: str
    vocab_size: Count
    splits: dict[str, Split]
    made_by: str = MADE_BY[PAIRS]
    corpus: str
    """Where the pairs came from, for people."""
    left_out: dict[str, Count]
    """How many pairs of the corpus are not in the data, by reason."""
    unknown: Count = 0
    """Tokens that the vocabulary lacks."""
    sha256: dict[str, str]
    """Of the files beside this one, by suffix."""

    def to_json(self, recipe: dict[str, Any]) -> str:
        """With all that the data follow from: data of the same recipe are the same."""
        return json.dumps({**asdict(self), "recipe": recipe}, indent=1) + "\n"
