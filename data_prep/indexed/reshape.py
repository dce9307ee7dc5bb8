"""One indexed dataset out of several, several out of one. Tokens are copied from file to file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import DataPrepError, named
from data_prep.files.progress import hashes
from data_prep.indexed.check import open_checked
from data_prep.indexed.manifest import Manifest, read_manifest, same_vocabulary, text_prefix
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import write_atomic
from megatron_ext.data.index_maps import saved_maps, split_documents
from megatron_ext.data.indexed_dataset import IndexedDataset, data_file, indexed_writer
from megatron_ext.data.masked.sentence_maps import saved_sentence_maps
from megatron_ext.data.masked.vocabulary import VOCABULARY

SEQUENCES = 1 << 16
"""Sequences that are copied at once."""
MADE = (".bin", ".idx", ".json", TOKENIZER, VOCABULARY)
"""What files of data end in."""


class _Part(NamedTuple):
    """Data that others are made of."""

    prefix: Path
    data: IndexedDataset
    manifest: Manifest | None

    @classmethod
    def open(cls, prefix: Path) -> _Part:
        return cls(prefix, open_checked(prefix), read_manifest(prefix))

    def has_tokens_of(self, other: _Part) -> bool:
        """Whether the tokens mean the same."""
        if self.data.dtype != other.data.dtype:
            return False
        if self.manifest is None or other.manifest is None:
            return self.manifest is other.manifest
        same_end = self.manifest.end_of_document == other.manifest.end_of_document
        return same_end and same_vocabulary(self.prefix, other.prefix)

    def kind_of_tokens(self) -> str:
        if self.manifest is None:
            return f"{self.data.dtype.name}, no manifest"
        tokenizer = f"{self.manifest.tokenizer} tokenizer {self.manifest.sha256.get(TOKENIZER, '')[:12]}".rstrip()
        return f"{self.data.dtype.name}, {tokenizer}, documents end with {self.manifest.end_of_document}"


def merge(prefixes: Sequence[Path], output: Path) -> Path:
    """Writes the documents of all data in their order. Returns the prefix of what it wrote. Raises DataPrepError: the
    data have not the same tokens, cannot be read or written, or are there."""
    prefix = _free(output, prefixes[0])
    parts = [_Part.open(path) for path in prefixes]
    first = parts[0]
    for part in parts:
        if not part.has_tokens_of(first):
            raise DataPrepError(
                f"{part.prefix} has tokens of another kind than {first.prefix}: {part.kind_of_tokens()} instead of "
                f"{first.kind_of_tokens()}"
            )
    data = [part.data for part in parts]
    ends = np.cumsum([0, *map(len, data)])
    boundaries = np.concatenate(
        [np.zeros(1, np.int64), *(part.boundaries[1:] + end for part, end in zip(data, ends, strict=False))]
    )
    with _all_or_nothing([prefix]):
        _write(prefix, [(part, range(len(part))) for part in data], boundaries)
        if first.manifest is not None:
            manifests = [part.manifest for part in parts if part.manifest is not None]
            source = " + ".join(manifest.source for manifest in manifests)
            recipe = {"merged": [manifest.sha256 for manifest in manifests]}
            _describe(prefix, first.prefix, replace(first.manifest, source=source, recipe=recipe))
    return prefix


def split(prefix: Path, weights: Sequence[float], output: Path) -> list[Path]:
    """Writes one dataset for each weight, with that share of the documents, in their order. Returns the prefixes.
    Raises DataPrepError: a share has no document, the data cannot be read or written, or are there."""
    data, manifest = open_checked(prefix), read_manifest(prefix)
    shares = split_documents(weights, data.documents)
    outputs = [_free(output.with_name(f"{output.name}-{number}"), prefix) for number in range(len(weights))]
    for weight, documents in zip(weights, shares, strict=True):
        if not documents:
            raise DataPrepError(f"--weights: {weight:g} of {sum(weights):g} is not a document of {data.documents}")
    with _all_or_nothing(outputs):
        for path, documents in zip(outputs, shares, strict=True):
            boundaries = data.boundaries[documents.start : documents.stop + 1]
            first, last = int(boundaries[0]), int(boundaries[-1])
            _write(path, [(data, range(first, last))], boundaries - first)
            if manifest is not None:
                source = f"{manifest.source}, documents {documents.start} to {documents.stop - 1}"
                recipe: dict[str, Any] = {"split": manifest.sha256, "documents": [documents.start, documents.stop]}
                _describe(path, prefix, replace(manifest, source=source, recipe=recipe))
    return outputs


def _free(output: Path, origin: Path) -> Path:
    prefix = text_prefix(output, data_file(origin, VOCABULARY).exists())
    for suffix in MADE:
        if data_file(prefix, suffix).exists():
            raise DataPrepError(
                f"--output {output}: {data_file(prefix, suffix)} exists; delete it, or choose another --output"
            )
    return prefix


@contextmanager
def _all_or_nothing(prefixes: Sequence[Path]) -> Iterator[None]:
    """For the making of data under names that are free: if it does not end well, nothing of them is left. Raises
    DataPrepError: they cannot be written."""
    try:
        with named():
            yield
    except BaseException as error:
        for prefix, suffix in product(prefixes, MADE):
            data_file(prefix, suffix).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise DataPrepError(
            f"{error.filename or prefixes[0]}: cannot be written ({error.strerror}); choose an --output that you may "
            "write to and that has room"
        ) from error


def _write(prefix: Path, parts: Sequence[tuple[IndexedDataset, range]], boundaries: np.typing.NDArray[Any]) -> None:
    """Writes these sequences of the data one after the other."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with indexed_writer(prefix, parts[0][0].dtype, boundaries) as writer:
        for data, sequences in parts:
            for first in range(sequences.start, sequences.stop, SEQUENCES):
                last = min(first + SEQUENCES, sequences.stop)
                begin = int(data.offsets[first]) // data.dtype.itemsize
                end = int(data.offsets[last - 1]) // data.dtype.itemsize + int(data.lengths[last - 1])
                writer.extend(data.lengths[first:last], data.tokens[begin:end])
    for path in (*saved_maps(prefix), *saved_sentence_maps(prefix)):  # of data that had this name
        path.unlink(missing_ok=True)


def _describe(prefix: Path, origin: Path, manifest: Manifest) -> None:
    """Gives data a manifest, and the tokeniser that lies beside `origin`."""
    data = open_checked(prefix)
    suffixes = [".bin", ".idx"]
    for suffix in (TOKENIZER, VOCABULARY):
        if suffix in manifest.sha256:
            shutil.copyfile(data_file(origin, suffix), data_file(prefix, suffix))
            suffixes.append(suffix)
    found = hashes({suffix: data_file(prefix, suffix) for suffix in suffixes})
    described = replace(manifest, documents=data.documents, tokens=len(data.tokens), left_out={}, sha256=found)
    write_atomic(data_file(prefix, ".json"), described.to_json())
