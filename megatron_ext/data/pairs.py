"""Samples for translation: sentence k of one language beside sentence k of the other (docs/formats.md)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.data.indexed_dataset import IndexedDataset
from megatron_ext.data.samples import Orders, Samples, Split, check_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
FEW_UNKNOWN = 0.03
"""Share of unknown tokens from which a user is warned: a vocabulary of words lacks some, one of parts of words none."""
MOST_UNKNOWN = 0.9
"""Share from which the vocabulary is not that of the text."""
"""Token ids in every vocabulary of pairs; the data have no marks, which are added here."""
SIDES = ("source", "target")


def side_prefix(prefix: Union[str, Path], split: str, side: str) -> Path:
    """Return the prefix of the indexed data of one language."""
    return Path(f"{prefix}-{split}.{side}")


class Pairs:
    """The pairs of a split that are not too long, by number.

    Raises:
        DataError: files are missing, damaged or do not belong together, or no pair is left.
    """

    def __init__(
        self, prefix: Union[str, Path], split: str, sequence_length: int, decoder_sequence_length: int
    ) -> None:
        sides = (IndexedDataset(side_prefix(prefix, split, side)) for side in SIDES)
        self.source, self.target = sides
        if len(self.source) != len(self.target):
            raise DataError(
                f"{self.source.idx}: {len(self.source)} sentences, but {self.target.idx.name} has {len(self.target)}; "
                "sentence k of one must be that of the other: prepare the pairs again with 'tdpp data pairs'"
            )
        # Each side gets one mark: the source its end; what the decoder reads its begin, what it writes its end.
        longest = np.array([sequence_length, decoder_sequence_length]) - 1
        lengths = np.stack([np.asarray(self.source.lengths), np.asarray(self.target.lengths)])
        self.kept: NDArray[np.int64] = np.flatnonzero(((lengths > 0) & (lengths <= longest[:, np.newaxis])).all(0))
        """Their numbers in the data."""
        self.left_out = len(self.source) - len(self.kept)
        if not len(self.kept):
            most = lengths.max(1, initial=0) + 1
            raise DataError(
                f"{self.source.idx}: none of {len(self.source)} pairs fits model.sequence_length={sequence_length} and "
                f"model.decoder_sequence_length={decoder_sequence_length}"
                + (f"; the longest need {most[0]} and {most[1]}" if len(self.source) else "; prepare more text")
            )


class PairSamples(Samples):
    """Pairs in a new order in every epoch, padded to the lengths that the model takes.

    All have one shape, which what crosses a cut has, too; `megatron_ext.data.pairs` trims them.

    Raises:
        DataError: as `Pairs`; or on use, a token is not in the vocabulary.
    """

    def __init__(
        self,
        prefix: Union[str, Path],
        split: Split,
        sequence_length: int,
        decoder_sequence_length: int,
        vocab_size: int,
    ) -> None:
        super().__init__(split.samples, split.name)
        self._pairs = Pairs(prefix, split.name, sequence_length, decoder_sequence_length)
        self._lengths = (sequence_length, decoder_sequence_length)
        self._vocab_size = vocab_size
        self.in_epoch = len(self._pairs.kept)
        self._orders = Orders.drawn(self.in_epoch, split.seed)
        self.order: Dict[str, float] = {"seed": split.seed, "pairs": self.in_epoch}

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """[sequence_length] and [decoder_sequence_length]: `text_enc` the source and its end, `enc_mask` 0 where
        there is padding; `text_dec` a begin and the target; `labels` the target and its end, `loss_mask` 1 there."""
        pair = int(self._pairs.kept[self._orders.place(number)])
        source, target = self._tokens(self._pairs.source, pair), self._tokens(self._pairs.target, pair)
        text_enc, enc_mask = padded([*source, END], self._lengths[0])
        text_dec, _ = padded([BEGIN, *target], self._lengths[1])
        labels, loss_mask = padded([*target, END], self._lengths[1])
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_mask": enc_mask,
        }

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[numbers, 2]: tokens of the source and of the target, with the mark that each gets."""
        pairs = self._pairs.kept[self._orders.places(numbers)]
        sides = (self._pairs.source, self._pairs.target)
        return np.stack([np.asarray(side.lengths)[pairs] for side in sides], -1).astype(np.int64) + 1

    def _tokens(self, data: IndexedDataset, pair: int) -> List[int]:
        tokens = data[pair]
        what = partial("{}: sentence {}".format, data.bin, pair)
        check_token_ids(tokens, self._vocab_size, what, f"model.vocab_size={self._vocab_size}", "set that of the data")
        return tokens.tolist()


def padded(values: List[int], length: int) -> List[NDArray[np.int64]]:
    """[length] twice: the values and `PAD`, and 1 where there is a value."""
    text, mask = np.full(length, PAD, np.int64), np.zeros(length, np.int64)
    text[: len(values)], mask[: len(values)] = values, 1
    return [text, mask]


# Samples of alike length beside each other, so that little of a micro-batch is padding.
#
# Some global batches at a time are sorted by length and dealt out anew: each has samples of alike length, and they come
# in a random order. Which samples these are does not change, and nothing but the samples' numbers decides about it, so
# that every layout, and a run that goes on, has the same ones in the same iteration.

_STREAM = 1
"""Beside the seed: other random numbers than those that the order of an epoch follows from."""


class Side(NamedTuple):
    """What has one length in a sample, and is padded to the longest of its micro-batch."""

    size: str
    """The size of the task's wires that it sets (`Task.sizes`)."""
    arrays: Tuple[str, ...]
    """Arrays of a sample, [longest] each."""
    longest: int


class BatchAssignment(NamedTuple):
    """How training samples are dealt out anew."""

    batches: int
    """That are sorted together."""
    batch_size: int
    """The global one."""
    seed: int

    @property
    def window(self) -> int:
        """Samples that are sorted together."""
        return self.batches * self.batch_size

    def whole(self, samples: int) -> int:
        """So many, and what the last window has beyond."""
        return -(-samples // self.window) * self.window


class Bucketed(Samples):
    """Other samples, sorted by length, whose batches are trimmed to their longest.

    With a `assignment` they are for training, and `inner` has whole windows; else they are held-out ones, which are all
    sorted, for nothing is learned from their order.
    """

    varying = True

    def __init__(
        self,
        inner: Samples,
        samples: int,
        split: str,
        sides: Sequence[Side],
        multiple: int,
        assignment: Optional[BatchAssignment] = None,
    ) -> None:
        """Lengths are rounded up to a `multiple`. `inner.lengths` has a column for each of both `sides`; samples are
        sorted by the second, and where that is the same by the first."""
        super().__init__(samples, split)
        self._inner = inner
        self._sides = sides
        self._multiple = multiple
        self._assignment = assignment
        self._window = samples if assignment is None else assignment.window
        self._orders = Orders(self._window, self._by_length)
        self.in_epoch = inner.in_epoch
        self.order: Dict[str, float] = dict(inner.order)
        if assignment is not None:
            self.order.update({"bucketing": assignment.batches, "global_batch_size": assignment.batch_size})

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        return self._inner.sample(int(self._dealt(np.array([number]))[0]))

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._inner.lengths(self._dealt(numbers))

    def sizes(self, numbers: NDArray[np.int64]) -> Dict[str, int]:
        longest = self.lengths(numbers.ravel()).max(0).tolist()
        rounded = (-(-length // self._multiple) * self._multiple for length in longest)
        return {side.size: min(side.longest, length) for side, length in zip(self._sides, rounded)}

    def batch(self, numbers: NDArray[np.int64]) -> Dict[str, NDArray[Any]]:
        batch, sizes = super().batch(numbers), self.sizes(numbers)
        for side in self._sides:
            for name in side.arrays:
                batch[name] = np.ascontiguousarray(batch[name][..., : sizes[side.size]])
        return batch

    def _dealt(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[samples]: which of the `inner` samples these are."""
        return numbers // self._window * self._window + self._orders.places(numbers)

    def _by_length(self, window: int) -> NDArray[np.int64]:
        """The order in which a window takes its samples."""
        first = window * self._window
        # Sources grow and shrink by turns, so that they are alike where targets of two lengths meet.
        source, target = self._inner.lengths(np.arange(first, first + self._window)).T
        order: NDArray[np.int64] = np.lexsort((np.where(target % 2, -source, source), target))
        if self._assignment is None:
            return order
        random = np.random.RandomState([self._assignment.seed, window, _STREAM])
        batches = order.reshape(self._assignment.batches, self._assignment.batch_size)
        return batches[random.permutation(len(batches))].ravel()
