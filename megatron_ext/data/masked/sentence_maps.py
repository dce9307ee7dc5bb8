"""Megatron's sentence map: which runs of sentences are the samples of a BERT or T5 model, and in which order.

Documents are gone through in their order, epoch after epoch, until there are enough samples; a sample takes sentences
until they have the tokens that it aims at, but never leaves a document or one last sentence of it. Now and then a
sample aims at fewer tokens. The map equals that of megatron-core's compiled helper bit for bit, and is named as
Megatron-LM's version 2 named it, with a hash of all that it follows from.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.map_places import FilesOf, find_maps, find_or_build, load_map, misfit, place_to_write

if TYPE_CHECKING:
    from numpy.typing import NDArray


LONGEST_SENTENCE = 512
"""Tokens; a document of several sentences of which one is longer is left out."""
BLOCK = 1 << 16
_misfit = partial(misfit, "sentence map")


class Cut(NamedTuple):
    """What decides, beside the sentences, which samples there are."""

    samples: int
    """Wanted; those of the last epoch all come."""
    length: int
    """Tokens that a sample aims at, at least 2."""
    short_seq_prob: float
    """How often it aims at fewer."""
    seed: int
    least_sentences: int
    """Sentences that a sample has at least: 2 where it is made of two parts, else 1."""


def compute(lengths: NDArray[np.int32], boundaries: NDArray[np.int64], cut: Cut) -> NDArray[Any]:
    """[samples, 3]: first sentence, the one after the last, and the tokens aimed at, in training order.

    `lengths` are those of all sentences (tokens); document d is the sentences `boundaries[d]` to `boundaries[d + 1]`.
    Which length a sample aims at depends on all before, so that this goes sample by sample: about a second for half
    a million. There is at least one sample in an epoch (see `usable`).
    """
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    firsts, lasts = (boundaries[kept].tolist() for kept in _usable(lengths, boundaries, cut.least_sentences))
    first = int(boundaries[0])
    ends = np.zeros(int(boundaries[-1]) - first + 1, np.int64)
    np.cumsum(lengths[first : int(boundaries[-1])], out=ends[1:])
    tokens = ends.data
    aims = _aims(cut)
    blocks: List[NDArray[Any]] = []
    held: List[int] = []
    found = 0
    while found < cut.samples:
        for begin, end in zip(firsts, lasts):
            start, stop = begin, begin
            while True:
                aim = next(aims)
                if stop == end:
                    break
                enough = tokens[start - first] + aim
                stop = bisect_left(tokens, enough, start + cut.least_sentences - first, end - first) + first
                if end - stop <= 1:
                    stop = end
                held += (start, stop, aim)
                found += 1
                start = stop
            if len(held) >= 3 * BLOCK:
                blocks.append(np.array(held, dtype))
                held = []
    blocks.append(np.array(held, dtype))
    samples = np.concatenate(blocks).reshape(-1, 3)
    return samples[_shuffled(len(samples), cut.seed + 1)]


def _usable(
    lengths: NDArray[np.int32], boundaries: NDArray[np.int64], least_sentences: int
) -> Tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the documents that give samples, and these plus 1."""
    count = np.diff(boundaries)
    long_before = np.concatenate([[0], np.cumsum(lengths > LONGEST_SENTENCE)])
    has_long = long_before[boundaries[1:]] > long_before[boundaries[:-1]]
    usable = np.flatnonzero((count >= least_sentences) & (count > 0) & ~(has_long & (count > 1)))
    return usable, usable + 1


def _aims(cut: Cut) -> Iterator[int]:
    """The lengths that samples aim at, one after the other; one more is drawn at the end of each document."""
    every = round_half_away(1.0 / cut.short_seq_prob) if cut.short_seq_prob > 0 else 0
    if not every:
        while True:
            yield cut.length
    for numbers in random_32(cut.seed):
        short = 2 + numbers % np.uint32(cut.length - 1)
        yield from np.where(numbers % np.uint32(every) == 0, short, np.uint32(cut.length)).tolist()


def round_half_away(value: float) -> int:
    """Round as C's `round` does, a value that is not negative."""
    whole = int(value)
    return whole + (value - whole >= 0.5)


def _shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """0 to `count` - 1 in an order that follows from `seed`: from the last on, each changes places with one before."""
    order = np.arange(count)
    places = order.data
    left = count
    for numbers in random_64(seed):
        if left <= 1:
            break
        taken = numbers[: left - 1]
        others = taken % np.arange(left, left - len(taken), -1).astype(np.uint64)
        for place, other in zip(range(left - 1, left - 1 - len(taken), -1), others.tolist()):
            places[place], places[other] = places[other], places[place]
        left -= len(taken)
    return order


def usable(data: IndexedDataset, documents: range, name: str, cut: Cut) -> int:
    """How many of `documents`, the split called `name`, give samples. Raises DataError: none does, or the samples have
    no room for text."""
    if cut.length < 2:
        raise DataError(f"samples have room for {cut.length} tokens of the text; use a larger model.sequence_length")
    least_sentences = cut.least_sentences
    boundaries = data.boundaries[documents.start : documents.stop + 1]
    found = len(_usable(data.lengths, boundaries, least_sentences)[0]) if len(documents) else 0
    if not found:
        counts = np.diff(boundaries)
        few = int((counts < max(1, least_sentences)).sum())
        need = "two sentences or more" if least_sentences > 1 else "a sentence"
        raise DataError(
            f"{data.bin}: no document of the {name} split gives a sample: of {len(documents)} (of {data.documents}), "
            f"{few} lack {need}, and {len(documents) - few} have a sentence of more than {LONGEST_SENTENCE} tokens; "
            "prepare data of sentences (tdpp data prepare --split-sentences), use more, or a data.split that gives "
            f"{name} more documents"
        )
    return found


def map_file(place: Union[str, Path], name: str, cut: Cut, fingerprint: str) -> Path:
    """The map's file."""
    stem = f"_{name}_indexmap_{cut.samples}mns_{cut.length}msl_{cut.short_seq_prob:0.2f}ssp_{cut.seed}s"
    return data_file(place, f"{stem}_{fingerprint}.npy")


def saved_sentence_maps(prefix: Union[str, Path]) -> List[Path]:
    """The files of all such maps that lie beside this data, those of Megatron's own name too."""
    stem = rf"{re.escape(Path(prefix).name)}_[a-z]+_indexmap_\d+mns_\d+msl_\d\.\d\dssp_\d+s"
    name = re.compile(rf"{stem}(_[0-9a-f]{{16}})?\.npy")
    return sorted(path for path in Path(prefix).parent.iterdir() if name.fullmatch(path.name))


def fingerprint_of(data: IndexedDataset, documents: range, cut: Cut) -> str:
    """16 hexadecimal digits that differ for maps that differ: a hash of all that `compute` takes."""
    content = hashlib.sha256(repr((documents.start, documents.stop, *cut)).encode())
    boundaries = data.boundaries[documents.start : documents.stop + 1]
    content.update(np.ascontiguousarray(boundaries, "<i8").data)
    content.update(np.ascontiguousarray(data.lengths[int(boundaries[0]) : int(boundaries[-1])], "<i4").data)
    return content.hexdigest()[:16]


def build_or_load(
    prefix: Union[str, Path], data: IndexedDataset, documents: range, name: str, cut: Cut, cache: Optional[str] = None
) -> NDArray[Any]:
    """The memory-mapped map, built if it is in none of the places where it may be; as `index_maps.build_or_load`.
    Raises DataError: the split gives no sample; the file cannot be written or read, or is not of this data."""
    usable(data, documents, name, cut)
    boundaries = data.boundaries[documents.start : documents.stop + 1]
    files_of = _files_of(data, documents, name, cut)
    (file,) = find_or_build(prefix, cache, files_of, lambda: [compute(data.lengths, boundaries, cut)])
    found = load_map(file)
    _check(found, file, data, documents, cut)
    return found


def check_saved(
    prefix: Union[str, Path], data: IndexedDataset, documents: range, name: str, cut: Cut, cache: Optional[str] = None
) -> None:
    """Whether `build_or_load` could use the map that is there, if there is one, or write it.

    It reads no more than the file's header.

    Raises:
        DataError: it has another form than these data ask for, or cannot be read; or there is no place for it.
    """
    files = find_maps(prefix, cache, _files_of(data, documents, name, cut))
    if files is None:
        place_to_write(prefix, cache)
    else:
        _check_form(load_map(files[0]), files[0], data, cut)


def _files_of(data: IndexedDataset, documents: range, name: str, cut: Cut) -> FilesOf:
    own = fingerprint_of(data, documents, cut)
    return lambda place: [map_file(place, name, cut, own)]


def _check_form(found: NDArray[Any], file: Path, data: IndexedDataset, cut: Cut) -> None:
    dtype = np.dtype(np.uint64 if len(data) > np.iinfo(np.uint32).max else np.uint32)
    if found.ndim != 2 or found.shape[0] < cut.samples or found.shape[1] != 3 or found.dtype != dtype:
        _misfit(file, f"{dtype.name} [{cut.samples} or more, 3]", f"{found.dtype.name} {list(found.shape)}")


def _check(found: NDArray[Any], file: Path, data: IndexedDataset, documents: range, cut: Cut) -> None:
    """Whoever may write where the map lies could have changed it: what it holds must fit this data. Raises DataError: a
    sample lies in no document that gives some, or sentences do not come equally often."""
    _check_form(found, file, data, cut)
    boundaries = data.boundaries[documents.start : documents.stop + 1]
    low, high = int(boundaries[0]), int(boundaries[-1])
    first, stop, aim = (found[:, column].astype(np.int64) for column in range(3))
    inside = (first >= low) & (first < stop) & (stop <= high)
    if not inside.all():
        wrong = int(np.argmin(inside))
        _misfit(file, f"sentences {low} to {high} in sample {wrong}", f"{first[wrong]} to {stop[wrong]}")
    if bool(np.any((aim < 2) | (aim > cut.length))):
        wrong = int(np.argmax((aim < 2) | (aim > cut.length)))
        _misfit(file, f"an aim of 2 to {cut.length} tokens in sample {wrong}", str(aim[wrong]))
    size = high - low + 1
    times = np.cumsum(np.bincount(first - low, minlength=size) - np.bincount(stop - low, minlength=size))[:-1]
    numbers, ends = _usable(data.lengths, boundaries, cut.least_sentences)
    marks = np.zeros(size, np.int64)
    np.add.at(marks, boundaries[numbers] - low, 1)
    np.add.at(marks, boundaries[ends] - low, -1)
    expected = np.cumsum(marks)[:-1]
    wrong_times = times != expected * times.max()
    if bool(wrong_times.any()):
        wrong = int(np.argmax(wrong_times))
        _misfit(file, f"sentence {low + wrong} {expected[wrong] * times.max()} times", f"{times[wrong]} times")
    inner = np.searchsorted(boundaries, first, "right") != np.searchsorted(boundaries, stop, "left")
    if bool(inner.any()):
        wrong = int(np.argmax(inner))
        _misfit(file, f"sample {wrong} in one document", f"sentences {first[wrong]} to {stop[wrong]}")


WORDS, MIDDLE = 312, 156
"""Words of the state of 64 bits (Nishimura 2000)."""
_FACTOR = 6364136223846793005
_TWIST = np.uint64(0xB5026F5AA96619E9)
_HIGH, _LOW = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)


def random_32(seed: int) -> Iterator[NDArray[np.uint32]]:
    """The numbers of `std::mt19937(seed)`, block after block; numpy's generator is the same, and seeded alike."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, BLOCK, np.uint32)


def random_64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """The numbers of `std::mt19937_64(seed)`, block after block."""
    words: List[int] = [seed % 2**64]
    for number in range(1, WORDS):
        words.append((_FACTOR * (words[-1] ^ (words[-1] >> 62)) + number) % 2**64)
    state = np.array(words, np.uint64)
    while True:
        _twist(state)
        yield _tempered(state)


def _twist(state: NDArray[np.uint64]) -> None:
    """The next words in place: each follows from itself, the one after it and the one half the state further."""
    for first in (0, MIDDLE):
        half, after = state[first : first + MIDDLE], state[first + 1 : first + MIDDLE + 1]
        # The last word's next one is the first of the new state, which is there by then.
        following = after if len(after) == MIDDLE else np.append(after, state[:1])
        mixed = (half & _HIGH) | (following & _LOW)
        other = state[MIDDLE - first : 2 * MIDDLE - first]
        half[:] = other ^ (mixed >> _ONE) ^ np.where(mixed & _ONE, _TWIST, np.uint64(0))


def _tempered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    mixed ^= (mixed << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    mixed ^= (mixed << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    mixed ^= mixed >> np.uint64(43)
    return mixed
