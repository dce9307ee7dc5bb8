"""What is trained on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, field

from omegaconf import MISSING

from conf.errors import ConfigError
from conf.schema import ranges
from conf.schema.config_class import config
from megatron_ext.contract import plan_parts
from megatron_ext.contract.models.model import BERT, IMAGES, T5


@config
class Corpus:
    prefix: str = MISSING
    """As `data.prefix`."""
    weight: float = 1.0
    """As `data.weight`."""


@config
class Augment:
    """Of images: how training changes them; every change follows from train.seed and the numbers of the samples."""

    padding: int = 0
    """Pixels around an image, of which a part of its own size is cut at random."""
    flip: bool = False
    """Mirror every other image, left to right."""
    rand_augment: int = 0
    """Operations that are drawn for each image (RandAugment)."""
    rand_augment_magnitude: float = 9.0
    """Of them, from 0 to 10."""
    erasing: float = 0.0
    """How often a rectangle of an image becomes noise (random erasing)."""
    mixup: float = 0.0
    """Alpha of the beta distribution by which pairs of a micro-batch's images are mixed; 0: they are not."""
    cutmix: float = 0.0
    """The same for rectangles that are taken from the other image; with both, one of the two is drawn each time."""

    def __post_init__(self) -> None:
        ranges.check("data.augment", self)


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
    mask_prob: float = 0.15
    """Of bert and t5: the part of a sample's tokens that is to be found."""
    short_seq_prob: float = 0.1
    """Of bert and t5: how often a sample aims at fewer tokens than there is room for."""
    masking_max_ngram: int | None = None
    """Of bert and t5: words that are hidden in a row, at most; null: 3 for bert, 10 for t5."""
    masking_do_full_word: bool = True
    """Of bert and t5: whether all tokens of a word are hidden."""
    masking_use_longer_ngrams: bool = False
    """Of bert and t5: whether long runs of hidden words are more frequent than short ones."""
    masking_use_geometric_distribution: bool | None = None
    """Of bert and t5: whether the lengths of runs are distributed geometrically, as in SpanBERT; null: for t5."""
    bucketing: int | None = None
    """Of transformer and gnmt: sort so many global batches at a time by length, such as 80, so that samples of alike
    length are padded together; null: they come as they are drawn, padded to the lengths that the model takes."""
    augment: Augment = field(default_factory=Augment)
    cache: str | None = None
    """A folder, which all nodes share, for index maps; null: beside the data, or, where you may not write there, in
    your own cache ($XDG_CACHE_HOME/tdpp or ~/.cache/tdpp)."""

    def __post_init__(self) -> None:
        ranges.check("data", self)
        check_split(self.split)
        _check_blend(self.corpora())

    def corpora(self) -> list[Corpus]:
        """All that is trained on, `prefix` first."""
        return [Corpus(prefix=self.prefix, weight=self.weight), *self.blend]

    def augmented(self, family: str) -> plan_parts.Augment | None:
        """What a rank is given for a model of this family; None: training changes no images."""
        if family not in IMAGES or self.augment == Augment(rand_augment_magnitude=self.augment.rand_augment_magnitude):
            return None
        return plan_parts.Augment(**asdict(self.augment))

    def masking(self, family: str) -> plan_parts.Masking | None:
        """What a rank is given for a model of this family, with Megatron's defaults."""
        if family not in (BERT, T5):
            return None
        ngram, geometric = self.masking_max_ngram, self.masking_use_geometric_distribution
        return plan_parts.Masking(
            mask_prob=self.mask_prob,
            short_seq_prob=self.short_seq_prob,
            max_ngram=ngram if ngram is not None else 3 if family == BERT else 10,
            full_word=self.masking_do_full_word,
            longer_ngrams=self.masking_use_longer_ngrams,
            geometric=geometric if geometric is not None else family == T5,
        )


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
        if number:
            ranges.check("data.blend", corpus, key)
        if prefixes[number] in prefixes[:number]:
            raise ConfigError(f"{key}.prefix={corpus.prefix} is in the blend already; give it the weight of both there")
