"""What a plan says of data: how samples are made of corpora, documents and images (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.contract.keys import PART, Range, about, between, from_0, option, positive


@dataclass(frozen=True)
class Corpus:
    """Indexed data and their weight in a blend."""

    prefix: str
    """The same as `data.prefix`."""
    weight: float = option(1.0, positive(), written=True)
    """The same as `data.weight`."""


@dataclass(frozen=True)
class Masking:
    """Which tokens of a sample BERT and T5 are to find, and how long samples are; as in Megatron."""

    mask_prob: float = field(metadata=about(PART))
    """The part of a sample's tokens."""
    short_seq_prob: float = field(metadata=about(between(0, 1)))
    """How often a sample aims at fewer tokens than there is room for."""
    max_ngram: int = field(metadata=about(between(1, 10**4)))
    """Words that are hidden in a row, at most."""
    full_word: bool
    """Whether all tokens of a word are hidden."""
    longer_ngrams: bool
    """Whether long runs are more frequent than short ones."""
    geometric: bool
    """Whether the lengths of runs are distributed geometrically (SpanBERT), which overrides `longer_ngrams`."""


ANSWERS = ".answers"
"""What the mask beside conversations ends in: a byte for each token, 1 where it is to be learned."""


@dataclass(frozen=True)
class Documents:
    """How samples are made where each document stands for itself, and is not a part of running text."""

    packing: bool
    """Whether several share a sample, without their seeing each other; else each has one of its own."""


@dataclass(frozen=True)
class Augment:
    """How training changes images; every change follows from the seed and the numbers of the samples."""

    padding: int = option(0, Range(0, 2**10), written=True)
    """Pixels of padding around an image, from which a random crop of the original size is taken."""
    flip: bool = option(False, written=True)
    """Mirror images left to right, with probability one half."""
    rand_augment: int = option(0, Range(0, 100), written=True)
    """Number of random operations per image (RandAugment)."""
    rand_augment_magnitude: float = option(9.0, between(0.0, 10.0), written=True)
    """Magnitude of these operations, from 0 to 10."""
    erasing: float = option(0.0, between(0.0, 1.0), written=True)
    """Probability that a rectangle of an image is replaced by noise (random erasing)."""
    mixup: float = option(0.0, from_0(1e3), written=True)
    """Mixup: alpha of the beta distribution by which pairs of images of a micro-batch are mixed; 0: off."""
    cutmix: float = option(0.0, from_0(1e3), written=True)
    """CutMix: the same for rectangles pasted from the other image; with both, one of the two is drawn each time."""
