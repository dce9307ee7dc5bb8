"""Samples that are documents, each alone or several packed into one; of conversations only answers are learned."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Sequence, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.gpt_samples import OTHER_TOKENIZER
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.samples import SPLITS, Orders, Samples, Split, check_token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

HELD_OUT, PACKED = 0, 1
"""Beside a seed, what is drawn with it: which conversations are held out, which documents share a sample."""


class Pieces(NamedTuple):
    """Parts of documents of which each fits into a sample."""

    document: NDArray[np.int64]
    begin: NDArray[np.int64]
    """In the document: the first token that is read."""
    length: NDArray[np.int64]
    """Tokens that are read; as many are predicted."""

    def of(self, numbers: NDArray[Any]) -> Pieces:
        return Pieces(*(one[numbers] for one in self))


class Documents:
    """The documents of a split, by number.

    Of conversations, `split` holds out some that are drawn, the same for every seed of a run; a longer one is cut, and
    one of which no answer is left is left out. Other documents are shared out in their order, and longer ones are cut
    into several pieces.

    Raises:
        DataError: files are missing, damaged or do not belong together, or no document is left.
    """

    def __init__(self, prefix: Union[str, Path], weights: Sequence[float], split: str, sequence_length: int) -> None:
        self.data = IndexedDataset(prefix)
        self.answers = _answers(prefix, self.data)
        count = len(self.data)
        drawn = np.arange(count)
        if self.answers is not None:
            drawn = np.random.RandomState(HELD_OUT).permutation(count)
        ends = [round(float(end) * count) for end in np.cumsum([0.0, *weights]) / sum(weights)]
        place = SPLITS.index(split)
        own = np.sort(drawn[ends[place] : ends[place + 1]])
        lengths = np.asarray(self.data.lengths)[own].astype(np.int64) - 1
        own, lengths = own[lengths > 0], lengths[lengths > 0]
        self.documents = len(own)
        self.cut = int((lengths > sequence_length).sum())
        """How many are longer than a sample."""
        if self.answers is None:
            self.pieces = _cut(own, lengths, sequence_length)
        else:
            found = Pieces(own, np.zeros_like(own), np.minimum(lengths, sequence_length))
            self.pieces = found.of(self._answered(found))
        self.left_out = self.documents - len(np.unique(self.pieces.document))
        """How many have no answer that a sample has room for."""
        if not len(self.pieces.document):
            why = f", of which {self.left_out} have no answer within model.sequence_length" if self.left_out else ""
            raise DataError(
                f"{self.data.idx}: the {split} split has {self.documents} of {count} documents{why}; give more data, "
                f"or {split} a larger share of data.split"
            )

    def sample(self, numbers: Sequence[int], length: int) -> Dict[str, NDArray[Any]]:
        """[length] each: pieces one after another, then padding. `tokens` and `labels`; `loss_mask`, 1 where a label
        is to be learned; `positions` in the piece."""
        made = {name: np.zeros(length, np.int64) for name in ("tokens", "labels", "loss_mask", "positions")}
        at = 0
        for number in numbers:
            document, begin, count = (int(one[number]) for one in self.pieces)
            tokens = self.data[document][begin : begin + count + 1]
            here = slice(at, at + count)
            made["tokens"][here], made["labels"][here] = tokens[:-1], tokens[1:]
            made["loss_mask"][here] = 1
            if self.answers is not None:
                first = int(self.data.offsets[document]) // self.data.dtype.itemsize + begin + 1
                made["loss_mask"][here] = self.answers[first : first + count]
            made["positions"][here] = np.arange(count)
            at += count
        made["positions"][at:] = np.arange(length - at)  # padding is a document of its own
        return made

    def _answered(self, pieces: Pieces) -> NDArray[np.int64]:
        """The numbers of the pieces with an answer that is predicted."""
        assert self.answers is not None
        if not len(pieces.document):
            return np.zeros(0, np.int64)
        first = np.asarray(self.data.offsets)[pieces.document] // self.data.dtype.itemsize + pieces.begin + 1
        ranges = np.stack([first, first + pieces.length], -1).ravel()
        if ranges[-1] == len(self.answers):
            ranges = ranges[:-1]
        return np.flatnonzero(np.maximum.reduceat(self.answers, ranges)[::2])


class DocumentSamples(Samples):
    """A split of the indexed dataset `prefix`: documents in a new order in every epoch, padded to the sequence length.

    Packed, each sample has as many as it has room for, the same in every epoch.

    Raises:
        DataError: as `Documents`; or on use, a token is not in the vocabulary.
    """

    def __init__(
        self, prefix: Union[str, Path], split: Split, sequence_length: int, vocab_size: int, packing: bool
    ) -> None:
        super().__init__(split.samples, split.name)
        self._found = Documents(prefix, split.weights, split.name, sequence_length)
        lengths = self._found.pieces.length
        self._samples_of: List[List[int]] = [[number] for number in range(len(lengths))]
        if packing:
            order = np.random.RandomState([split.seed, PACKED]).permutation(len(lengths))
            self._samples_of = packed(lengths, order, sequence_length)
        self._packing = packing
        self._length = sequence_length
        self._vocab_size = vocab_size
        self.in_epoch = len(self._samples_of)
        self._orders = Orders.drawn(self.in_epoch, split.seed)
        self.order: Dict[str, float] = {
            "documents": self._found.documents,
            "pieces": len(lengths),
            "tokens": int(lengths.sum()),
            "samples": self.in_epoch,
            "sequence_length": sequence_length,
            "packing": int(packing),
            "seed": split.seed,
        }

    def sample(self, number: int) -> Dict[str, NDArray[Any]]:
        """What `Documents.sample` says; `positions` if documents are packed."""
        made = self._found.sample(self._samples_of[self._orders.place(number)], self._length)
        what = partial("{}: sample {}".format, self._found.data.bin, number)
        for tokens in (made["tokens"], made["labels"]):
            check_token_ids(tokens, self._vocab_size, what, f"model.vocab_size={self._vocab_size}", OTHER_TOKENIZER)
        if not self._packing:
            del made["positions"]
        return made


def packed(lengths: NDArray[np.int64], order: NDArray[np.int64], room: int) -> List[List[int]]:
    """The numbers of the lengths that share a sample of `room`: each, in this order, goes where it leaves the least."""
    found: List[List[int]] = []
    by_room: Dict[int, List[int]] = {}
    rooms: List[int] = []
    for number in order.tolist():
        length = int(lengths[number])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            sample, left = len(found), room
            found.append([])
        else:
            left = rooms[at]
            sample = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[at]
        found[sample].append(number)
        left -= length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(sample)
    return found


def samples_in_epoch(
    prefix: Union[str, Path], weights: Sequence[float], split: Split, sequence_length: int, packing: bool
) -> int:
    """The samples of a split before any of its documents comes again. Raises DataError: as `Documents`."""
    split = split._replace(weights=tuple(weights))
    return DocumentSamples(prefix, split, sequence_length, 1, packing).in_epoch or 0


def _cut(documents: NDArray[np.int64], lengths: NDArray[np.int64], room: int) -> Pieces:
    counts = -(-lengths // room)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = number * room
    return Pieces(np.repeat(documents, counts), begins, np.minimum(np.repeat(lengths, counts) - begins, room))


def _answers(prefix: Union[str, Path], data: IndexedDataset) -> Any:
    """[tokens]: 1 where a token is to be learned; None for documents that are no conversations."""
    path = data_file(prefix, ANSWERS)
    if not path.exists():
        return None
    if path.stat().st_size != len(data.tokens):
        raise DataError(
            f"{path}: expected {len(data.tokens)} bytes, one for each token, found {path.stat().st_size}; the files do "
            "not belong together: prepare the data again with 'tdpp data chats'"
        )
    return np.memmap(path, np.uint8, "r") if len(data.tokens) else np.zeros(0, np.uint8)
