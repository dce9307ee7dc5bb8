"""What is trained on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, field

from conf.errors import ConfigError
from conf.schema.values import ranges
from conf.schema.values.ranges import MISSING, config
from megatron_ext.contract import plan_parts
from megatron_ext.contract.keys import PART, Range, between, option, positive
from megatron_ext.contract.models.model import IMAGES, family_named


@config
class Corpus(plan_parts.Corpus):
    prefix: str = MISSING


@config
class Augment(plan_parts.Augment):
    """How training changes images; every change follows from train.seed and the numbers of the samples."""

    def __post_init__(self) -> None:
        ranges.check("data.augment", self)


@config
class Data:
    prefix: str = MISSING
    """Path of the indexed data, without .bin and .idx, for example data/stdlib_text_document."""
    weight: float = option(1.0, positive())
    """Weight of these data in a blend, relative to the others."""
    blend: list[Corpus] = field(default_factory=list)
    """Further indexed data to mix in: `[{prefix: data/b_text_document, weight: 0.3}]`."""
    split: str = "969,30,1"
    """Weights of the training, validation and test documents."""
    mask_prob: float = option(0.15, PART)
    """For bert and t5: the fraction of a sample's tokens to predict."""
    short_seq_prob: float = option(0.1, between(0.0, 1.0))
    """For bert and t5: the probability that a sample is made shorter than the longest possible."""
    masking_max_ngram: int | None = option(None, Range(1, 10**4))
    """For bert and t5: the most words masked in a row; null: 3 for bert, 10 for t5."""
    masking_do_full_word: bool = True
    """For bert and t5: mask all tokens of a word together."""
    masking_use_longer_ngrams: bool = False
    """For bert and t5: prefer long runs of masked words to short ones."""
    masking_use_geometric_distribution: bool | None = None
    """For bert and t5: draw the lengths of runs from a geometric distribution, as in SpanBERT; null: only for t5."""
    bucketing: int | None = option(None, Range(1, 10**4))
    """For transformer and gnmt: sort this many global batches at a time by length, such as 80, so that samples of
    similar length are padded together; null: samples keep their random order and are padded to the model's lengths."""
    packing: bool = False
    """For gpt and huggingface: put several documents into a sample, without their seeing each other: attention stays
    within each, and positions restart. Otherwise text is cut into samples where it runs, and a conversation has a
    sample of its own."""
    augment: Augment = field(default_factory=Augment)
    cache: str | None = None
    """A shared folder for index maps; null: beside the data or, if you may not write there, in your own cache
    ($XDG_CACHE_HOME/tdpp or ~/.cache/tdpp)."""

    def __post_init__(self) -> None:
        ranges.check("data", self)
        check_split(self.split)
        _check_blend(self.corpora())

    def corpora(self) -> list[Corpus]:
        """All that is trained on, `prefix` first."""
        return [Corpus(prefix=self.prefix, weight=self.weight), *self.blend]

    def augmented(self, family: str) -> plan_parts.Augment | None:
        """What a rank is given for a model of this family; None: training changes no images."""
        unchanged = Augment(rand_augment_magnitude=self.augment.rand_augment_magnitude)
        if family_named(family).learns != IMAGES or self.augment == unchanged:
            return None
        return plan_parts.Augment(**asdict(self.augment))

    def documents(self) -> plan_parts.Documents | None:
        """What a rank is given where samples are documents; None: they are running text, or no text."""
        chats = any(os.path.exists(corpus.prefix + plan_parts.ANSWERS) for corpus in self.corpora())  # noqa: PTH110
        return plan_parts.Documents(packing=self.packing) if chats or self.packing else None

    def masking(self, family: str) -> plan_parts.Masking | None:
        """What a rank is given for a model of this family, with Megatron's defaults."""
        traits = family_named(family)
        if traits.masking_ngram is None:
            return None
        ngram, geometric = self.masking_max_ngram, self.masking_use_geometric_distribution
        return plan_parts.Masking(
            mask_prob=self.mask_prob,
            short_seq_prob=self.short_seq_prob,
            max_ngram=ngram if ngram is not None else traits.masking_ngram,
            full_word=self.masking_do_full_word,
            longer_ngrams=self.masking_use_longer_ngrams,
            geometric=geometric if geometric is not None else traits.masking_geometric,
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
            ranges.check(key, corpus)
        if prefixes[number] in prefixes[:number]:
            raise ConfigError(
                f"{key}.prefix={corpus.prefix} is already in the blend; give the sum of both weights there"
            )
