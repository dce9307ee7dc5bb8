"""Megatron's index maps: in which order the training samples come, and where each one lies.

The documents, once per epoch and shuffled, are laid end to end; sample i is the `sequence_length + 1` tokens from
token `i * sequence_length` on, so that each sample ends with the token the next one begins with; the samples are
shuffled too. The maps equal those of Megatron-LM's GPT dataset bit for bit. Their names are those that its version 2
gave them, with a hash of all that they follow from.
As there, a document is a sequence of the indexed dataset: GPT data have one sequence per document.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from megatron_ext.contract.errors import DataError
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file
from megatron_ext.data.map_places import FilesOf, find_maps, find_or_build, load_map, misfit, place_to_write

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1 << 15
"""Documents that are gone through at once."""
_misfit = partial(misfit, "index map")


class IndexMaps(NamedTuple):
    """Sample k of training is the tokens between rows `shuffle_idx[k]` and `shuffle_idx[k] + 1` of `sample_idx`."""

    doc_idx: NDArray[np.int32]
    """[epochs * documents]: document numbers in the order they are laid end to end."""
    sample_idx: NDArray[np.int32]
    """[samples + 1, 2]: index into `doc_idx` and token offset in that document, where each sample begins."""
    shuffle_idx: NDArray[np.uint32]
    """[samples]: rows of `sample_idx` in training order."""


class Layout(NamedTuple):
    """How many times the documents are gone through for a number of samples."""

    epochs: int
    samples: int
    """All that fit into the epochs: at least those asked for."""
    shuffled_together: int
    """The first so many samples are shuffled among themselves, the rest, of the last epoch, likewise."""

    @property
    def separate_last_epoch(self) -> bool:
        return self.shuffled_together < self.samples


def layout(tokens: int, samples: int, sequence_length: int) -> Layout:
    """The fewest epochs of `tokens` tokens that hold `samples` samples.

    Where less than 80 % of the last epoch is needed, it is shuffled apart: every document then comes in each of the
    epochs before, and only the rest of the samples is a choice.
    """
    epochs = -(-(samples * sequence_length + 1) // tokens)
    total = (epochs * tokens - 1) // sequence_length
    before_last = ((epochs - 1) * tokens - 1) // sequence_length
    in_one = (tokens - 1) // sequence_length
    separate = epochs > 1 and samples - before_last < int(0.80 * in_one)
    return Layout(epochs, total, before_last if separate else total)


def split_documents(weights: Sequence[float], documents: int) -> List[range]:
    """The document numbers of training, validation and test, in proportion to their weights.

    Each share is rounded to whole documents; the first makes up for what that adds or loses, as in Megatron.
    """
    total = float(sum(weights))
    counts = [round(weight / total * float(documents)) for weight in weights]
    counts[0] -= sum(counts) - documents
    return [range(end - count, end) for count, end in zip(counts, np.cumsum(counts).tolist())]


def require_one_sample(data: IndexedDataset, documents: range, name: str, sequence_length: int) -> None:
    """Raises `DataError` when `documents`, the split called `name`, do not have the tokens of one sample."""
    tokens = int(data.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens <= sequence_length:
        raise DataError(
            f"{data.bin}: the {name} split has {tokens} tokens in {len(documents)} of {len(data)} documents, but one "
            f"sample takes {sequence_length + 1} (model.sequence_length={sequence_length} and one to predict); use "
            f"more data, shorter sequences, or a data.split that gives {name} more documents"
        )


def compute(lengths: NDArray[np.int32], documents: range, samples: int, sequence_length: int, seed: int) -> IndexMaps:
    """The maps for at least `samples` samples of `documents`; `lengths` (tokens) are those of all documents.

    Pure and deterministic; time and memory are linear in documents and samples.
    """
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    plan = layout(tokens, samples, sequence_length)
    random = np.random.RandomState(seed)
    one_epoch = np.arange(documents.start, documents.stop, dtype=np.int32)
    doc_idx = np.tile(one_epoch, plan.epochs)
    if plan.separate_last_epoch:
        random.shuffle(doc_idx[: -len(documents)])
        random.shuffle(doc_idx[-len(documents) :])
    else:
        random.shuffle(doc_idx)
    dtypes = _dtypes(len(doc_idx), plan.samples)
    sample_idx = np.empty((plan.samples + 1, 2), dtypes[1])
    for first, document, offset in sample_starts(lengths, doc_idx, sequence_length):
        block = sample_idx[first : first + len(document)]
        block[:, 0], block[:, 1] = document, offset
    shuffle_idx = np.arange(plan.samples, dtype=dtypes[2])
    random.shuffle(shuffle_idx[: plan.shuffled_together])
    if plan.separate_last_epoch:
        random.shuffle(shuffle_idx[plan.shuffled_together :])
    return IndexMaps(doc_idx, sample_idx, shuffle_idx)


def sample_starts(
    lengths: NDArray[np.int32], doc_idx: NDArray[np.int32], sequence_length: int
) -> Iterator[Tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Where the samples begin in the documents `doc_idx` laid end to end: the map `sample_idx`, block after block.

    Of each block its first row, then the columns: the document that holds token `row * sequence_length`, and where in
    it. Counting how many such tokens lie before the end of each document finds them all in linear time; blocks are as
    large as fits a CPU's cache, which takes a third of the time that whole arrays take.
    """
    tokens = rows = 0
    for first in range(0, len(doc_idx), BLOCK):
        ends = np.zeros(min(BLOCK, len(doc_idx) - first) + 1, np.int64)
        np.cumsum(lengths.take(doc_idx[first : first + BLOCK]), out=ends[1:])
        ends += tokens
        rows_before_end = (ends[1:] + (sequence_length - 1)) // sequence_length - rows
        count = int(rows_before_end[-1])
        document = np.cumsum(np.bincount(rows_before_end, minlength=count + 1)[:count])
        offset = np.arange(rows, rows + count) * sequence_length - ends.take(document)
        document += first
        if rows == 0 and count:
            document[0] = 0  # Megatron begins with the first document, even an empty one.
        yield rows, document, offset
        tokens, rows = int(ends[-1]), rows + count


def sample_tokens(data: IndexedDataset, maps: IndexMaps, sample: int) -> NDArray[np.int64]:
    """[sequence_length + 1]: the token ids of one sample, cut from documents laid end to end."""
    row = int(maps.shuffle_idx[sample])
    (first, start), (last, end) = maps.sample_idx[row : row + 2].tolist()
    pieces = [data[document] for document in maps.doc_idx[first : last + 1].tolist()]
    pieces[-1] = pieces[-1][: end + 1]
    pieces[0] = pieces[0][start:]
    return np.concatenate(pieces).astype(np.int64)


def map_files(
    place: Union[str, Path], name: str, samples: int, sequence_length: int, seed: int, fingerprint: str = ""
) -> List[Path]:
    """The three files of `IndexMaps`, in its order; without `fingerprint` as Megatron calls them."""
    stem = f"_{name}_indexmap_{samples}ns_{sequence_length}sl_{seed}s_" + (fingerprint and f"{fingerprint}_")
    return [data_file(place, f"{stem}{field}.npy") for field in IndexMaps._fields]


def fingerprint_of(lengths: NDArray[np.int32], documents: range, samples: int, sequence_length: int, seed: int) -> str:
    """16 hexadecimal digits that differ for maps that differ: a hash of all that `compute` takes."""
    given = (documents.start, documents.stop, samples, sequence_length, seed)
    content = hashlib.sha256(repr(given).encode())
    content.update(np.ascontiguousarray(lengths[documents.start : documents.stop], "<i4").data)
    return content.hexdigest()[:16]


def saved_maps(prefix: Union[str, Path]) -> List[Path]:
    """The files of all maps that lie beside this data, for whatever samples, sequence length and seed."""
    fields = "|".join(IndexMaps._fields)
    stem = rf"{re.escape(Path(prefix).name)}_[a-z]+_indexmap_\d+ns_\d+sl_\d+s_([0-9a-f]{{16}}_)?"
    name = re.compile(rf"{stem}({fields})\.npy")
    return sorted(path for path in Path(prefix).parent.iterdir() if name.fullmatch(path.name))


def build_or_load(
    prefix: Union[str, Path],
    data: IndexedDataset,
    documents: range,
    name: str,
    samples: int,
    sequence_length: int,
    seed: int,
    cache: Optional[str] = None,
) -> IndexMaps:
    """The memory-mapped maps, built if they are in none of the places where they may be (`map_places`).

    Megatron's own maps, which lie beside the data under names without a hash, are used if they fit.

    Raises:
        DataError: the split has too few tokens; the files cannot be written or read, or are not of this data.
    """
    require_one_sample(data, documents, name, sequence_length)
    common = (name, samples, sequence_length, seed)
    files_of = _own_files(data, documents, *common)
    theirs = map_files(prefix, *common)
    if cache is None and all(file.is_file() for file in theirs) and find_maps(prefix, cache, files_of) is None:
        try:
            return _loaded(theirs, data, documents, samples, sequence_length)
        except DataError:  # of another split, or of what the data were before
            pass
    build = partial(compute, data.lengths, documents, samples, sequence_length, seed)
    files = find_or_build(prefix, cache, files_of, build)
    return _loaded(files, data, documents, samples, sequence_length)


def _own_files(
    data: IndexedDataset, documents: range, name: str, samples: int, sequence_length: int, seed: int
) -> FilesOf:
    own = fingerprint_of(data.lengths, documents, samples, sequence_length, seed)
    return lambda place: map_files(place, name, samples, sequence_length, seed, own)


def _loaded(files: List[Path], data: IndexedDataset, documents: range, samples: int, sequence_length: int) -> IndexMaps:
    maps = IndexMaps(*(load_map(file) for file in files))
    _check(maps, files, data, documents, samples, sequence_length)
    return maps


def check_saved(
    prefix: Union[str, Path],
    data: IndexedDataset,
    documents: range,
    name: str,
    samples: int,
    sequence_length: int,
    seed: int,
    cache: Optional[str] = None,
) -> None:
    """Whether `build_or_load` could use the maps that are there, if there are any, or write some.

    It reads no more than the headers of the files.

    Raises:
        DataError: they have other sizes than this data ask for, or cannot be read; or there is no place for them.
    """
    files = find_maps(prefix, cache, _own_files(data, documents, name, samples, sequence_length, seed))
    if files is None:
        place_to_write(prefix, cache)
        return
    maps = IndexMaps(*(load_map(file) for file in files))
    _check_sizes(maps, files, _layout_of(data, documents, samples, sequence_length), documents)


def _layout_of(data: IndexedDataset, documents: range, samples: int, sequence_length: int) -> Layout:
    tokens = int(data.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return layout(tokens, samples, sequence_length)


def _dtypes(entries: int, samples: int) -> List[np.dtype[Any]]:
    """Return the types of the three maps, for `entries` entries of `doc_idx`; Megatron widens two where 32 bits would
    not do."""
    wide_entries = entries > np.iinfo(np.int32).max
    wide_samples = samples >= np.iinfo(np.uint32).max - 1
    chosen = (np.int32, np.int64 if wide_entries else np.int32, np.int64 if wide_samples else np.uint32)
    return [np.dtype(kind) for kind in chosen]


def _check(
    maps: IndexMaps, files: List[Path], data: IndexedDataset, documents: range, samples: int, sequence_length: int
) -> None:
    """Whoever may write where the maps lie could have changed them: what they hold must fit this data. Raises
    DataError: it does not."""
    plan = _layout_of(data, documents, samples, sequence_length)
    _check_sizes(maps, files, plan, documents)
    low, high = int(maps.doc_idx.min()), int(maps.doc_idx.max())
    if low < documents.start or high >= documents.stop:
        _misfit(files[0], f"documents {documents.start} to {documents.stop - 1}", f"{low} to {high}")
    times = np.bincount(maps.doc_idx - documents.start, minlength=len(documents))
    if bool(np.any(times != plan.epochs)):
        wrong = int(np.argmax(times != plan.epochs))
        _misfit(files[0], f"document {documents[wrong]} {plan.epochs} times", f"{times[wrong]} times")
    for first, document, offset in sample_starts(data.lengths, maps.doc_idx, sequence_length):
        block = maps.sample_idx[first : first + len(document)]
        differs = (block[:, 0] != document) | (block[:, 1] != offset)
        if differs.any():
            wrong = int(np.argmax(differs))
            start = [int(document[wrong]), int(offset[wrong])]
            _misfit(files[1], f"sample {first + wrong} to begin at {start}", f"{block[wrong].tolist()}")
    seen = np.zeros(plan.samples, bool)
    seen[maps.shuffle_idx[maps.shuffle_idx < plan.samples]] = True
    if not seen.all():
        _misfit(files[2], f"every sample of {plan.samples} once", f"no sample {int(np.argmin(seen))}")


def _check_sizes(maps: IndexMaps, files: List[Path], plan: Layout, documents: range) -> None:
    shapes = ((plan.epochs * len(documents),), (plan.samples + 1, 2), (plan.samples,))
    for found, file, shape, dtype in zip(maps, files, shapes, _dtypes(shapes[0][0], plan.samples)):
        if found.shape != shape or found.dtype != dtype:
            _misfit(file, f"{dtype.name} {list(shape)}", f"{found.dtype.name} {list(found.shape)}")
