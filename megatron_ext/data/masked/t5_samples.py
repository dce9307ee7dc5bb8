"""The training samples of a T5 model: spans of a text become sentinels, and the decoder writes the spans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan_parts import Masking
from megatron_ext.data.masked.masked_samples import MaskedSamples, padded
from megatron_ext.data.masked.sentence_maps import Cut
from megatron_ext.data.samples import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPECIAL = ("mask", "pad", "bos", "eos")


def cut_of(split: Split, sequence_length: int, masking: Masking) -> Cut:
    """The text of samples, two tokens shorter than the encoder's sequence, as in Megatron."""
    return Cut(split.samples, sequence_length - 2, masking.short_seq_prob, split.seed, 1)


class T5Samples(MaskedSamples):
    """Samples of `sequence_length` tokens for the encoder and `decoder_sequence_length` for the decoder.

    Raises:
        DataError: see `MaskedSamples`; or a sample has more spans than there are sentinels.
    """

    def __init__(
        self,
        prefix: Union[str, Path],
        split: Split,
        sequence_length: int,
        decoder_sequence_length: int,
        vocab_size: int,
        masking: Masking,
    ) -> None:
        super().__init__(prefix, split, vocab_size, masking, cut_of(split, sequence_length, masking), SPECIAL)
        self._lengths = (sequence_length, decoder_sequence_length)

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """Make a sample as megatron-core does: [sequence_length] and [decoder_sequence_length], and one number.

        `text_enc` the text with a sentinel for each span; `text_dec` what the decoder reads, `labels` what it writes:
        each sentinel and its span, -1 after them; `loss_mask` 1 where it writes; `enc_mask` and `dec_mask` 0 where
        there is padding; `truncated` whether tokens were left out.
        """
        sentences, aim, random = self.drawn(number)
        special = self._special
        whole = [token for sentence in sentences for token in sentence]
        masked = self._masker.masked(whole[:aim], aim, random, lambda _: special["mask"])
        if len(masked.spans) > len(self._vocabulary.sentinels):
            raise DataError(
                f"{self._data.bin}: sample {number} has {len(masked.spans)} spans, but the tokenizer has "
                f"{len(self._vocabulary.sentinels)} sentinels; prepare the data with a larger --vocab-extra-ids, or "
                "use a smaller data.mask_prob"
            )
        read: List[int] = []
        written: List[int] = []
        begin = 0
        for sentinel, span in zip(self._vocabulary.sentinels, masked.spans):
            read += [*masked.tokens[begin : span.places[0]], sentinel]
            written += [sentinel, *span.tokens]
            begin = span.places[-1] + 1
        read += masked.tokens[begin:]
        for key, found, length in zip(
            ("model.sequence_length", "model.decoder_sequence_length"), (len(read), len(written) + 1), self._lengths
        ):
            if found > length:
                raise DataError(
                    f"{self._data.bin}: sample {number} takes {found} tokens, but {key}={length}; use a larger one, or "
                    "a smaller data.mask_prob"
                )
        text_enc = padded(read, self._lengths[0], special["pad"])
        text_dec = padded([special["bos"], *written], self._lengths[1], special["pad"])
        labels = padded([*written, special["eos"]], self._lengths[1], -1)
        masks = [(text != special["pad"]).astype(np.int64) for text in (text_enc, text_dec)]
        for content in (text_enc, text_dec, labels):
            content[content == special["pad"]] = 0
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": padded([1] * (len(written) + 1), self._lengths[1], 0),
            "truncated": np.array(len(whole) > aim, np.int64),
            "enc_mask": masks[0],
            "dec_mask": masks[1],
        }
