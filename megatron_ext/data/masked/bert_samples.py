"""The training samples of a BERT model: two runs of sentences, of which tokens are hidden, as in megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

import numpy as np

from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data.masked.masked_samples import MaskedSamples, padded
from megatron_ext.data.masked.sentence_maps import Cut
from megatron_ext.data.samples import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPECIAL = ("cls", "sep", "mask", "pad")


def cut_of(split: Split, sequence_length: int, masking: Masking, pairs: bool) -> Cut:
    """The text of samples, which leaves room for [CLS] and two [SEP]."""
    return Cut(split.samples, sequence_length - 3, masking.short_seq_prob, split.seed, 2 if pairs else 1)


class BertSamples(MaskedSamples):
    """Samples of `sequence_length` tokens: [CLS] a [SEP] b [SEP] and padding; without `pairs` all of it is part a.

    Raises:
        DataError: see `MaskedSamples`.
    """

    def __init__(
        self,
        prefix: Union[str, Path],
        split: Split,
        sequence_length: int,
        vocab_size: int,
        masking: Masking,
        pairs: bool,
    ) -> None:
        cut = cut_of(split, sequence_length, masking, pairs)
        super().__init__(prefix, split, vocab_size, masking, cut, SPECIAL)
        self._sequence_length = sequence_length
        self._pairs = pairs

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """Make a sample as megatron-core does: [sequence_length] each, and two numbers.

        `text` the tokens, some of them hidden; `types` 1 in part b; `labels` what was hidden, -1 elsewhere;
        `loss_mask` 1 where something was; `padding_mask` 0 where there is padding; `is_random` whether part b came
        before part a in the text; `truncated` whether tokens were left out.
        """
        sentences, aim, random = self.drawn(number)
        special, length = self._special, self._sequence_length
        first, second, swapped = self._parts(sentences, random)
        truncated = len(first) + len(second) > aim
        if truncated:
            first, second = _trimmed(first, second, aim, random)
        tokens = [special["cls"], *first, special["sep"]]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, special["sep"]]
            types += [1] * (len(second) + 1)
        masked = self._masker.masked(tokens, aim, random, self._instead)
        places, hidden = masked.hidden()
        text = padded(masked.tokens, length, special["pad"])
        is_padding = text == special["pad"]
        labels, loss_mask = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        labels[places], loss_mask[places] = hidden, 1
        text[is_padding] = 0
        labels[labels == special["pad"]] = 0
        return {
            "text": text,
            "types": padded(types, length, 0),
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "loss_mask": loss_mask,
            "padding_mask": (~is_padding).astype(np.int64),
            "truncated": np.array(truncated, np.int64),
        }

    def _parts(self, sentences: List[List[int]], random: np.random.RandomState) -> Tuple[List[int], List[int], bool]:
        """The tokens of both parts, and whether the second came first in the text."""
        pivot, swapped = len(sentences), False
        if self._pairs:
            pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
            swapped = bool(random.random_sample() < 0.5)
        parts = [[token for sentence in part for token in sentence] for part in (sentences[:pivot], sentences[pivot:])]
        return parts[swapped], parts[not swapped], swapped

    def _instead(self, random: np.random.RandomState) -> Optional[int]:
        """Choose what stands in the place of a hidden token: of ten, eight become [MASK], one becomes any token, and
        one stays."""
        if random.random_sample() < 0.8:
            return self._special["mask"]
        return int(random.randint(0, self._vocabulary.size)) if random.random_sample() >= 0.5 else None


def _trimmed(
    first: List[int], second: List[int], most: int, random: np.random.RandomState
) -> Tuple[List[int], List[int]]:
    """Both without tokens at either end, always of the longer one, until they have `most` tokens together."""
    ends = [[0, len(first)], [0, len(second)]]
    for at_start in (random.random_sample(len(first) + len(second) - most) < 0.5).tolist():
        (start, stop), (other_start, other_stop) = ends
        longer = ends[0] if stop - start > other_stop - other_start else ends[1]
        longer[0 if at_start else 1] += 1 if at_start else -1
    return first[slice(*ends[0])], second[slice(*ends[1])]
