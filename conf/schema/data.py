"""What is trained on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import field

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config


@config
class Corpus:
    prefix: str = MISSING
    """As `data.prefix`."""
    weight: float = 1.0
    """As `data.weight`."""


@config
class Data:
    prefix: str = MISSING
    """Path of the indexed data without .bin and .idx, for example data/stdlib_text_document."""
    weight: float = 1.0
    """Share of these data in a blend, to that of the others."""
    blend: list[Corpus] = field(default_factory=list)
    """Further indexed data, whose samples are mixed in: `[{prefix: data/b_text_document, weight: 0.3}]`."""
    split: str = "969,30,1"
    """Weights of the training, validation and test documents."""
    cache: str | None = None
    """A folder, which all nodes share, for index maps; null: beside the data, or, where you may not write there, in
    your own cache ($XDG_CACHE_HOME/tdpp or ~/.cache/tdpp)."""

    def __post_init__(self) -> None:
        check_split(self.split)
        _check_blend(self.corpora())

    def corpora(self) -> list[Corpus]:
        """All that is trained on, `prefix` first."""
        return [Corpus(prefix=self.prefix, weight=self.weight), *self.blend]


def check_split(text: str) -> None:
    weight = r"\s*[0-9]+(\.[0-9]+)?\s*"
    if not re.fullmatch(f"{weight},{weight},{weight}", text) or not float(text.split(",")[0]):
        raise ConfigError(
            f"data.split={text!r} must be three weights for training, validation and test, the first above "
            "0, such as '969,30,1'"
        )


def _check_blend(corpora: Sequence[Corpus]) -> None:
    prefixes = [os.path.abspath(corpus.prefix) for corpus in corpora]  # noqa: PTH100  (takes '..' away, follows no link)
    for number, corpus in enumerate(corpora):
        key = f"data.blend[{number - 1}]" if number else "data"
        ranges.check("data", corpus, key)
        if prefixes[number] in prefixes[:number]:
            raise ConfigError(f"{key}.prefix={corpus.prefix} is in the blend already; give it the weight of both there")
