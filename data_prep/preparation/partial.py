"""Indexed data in the making: a hidden folder beside them, from which an interrupted preparation goes on.

.<name>.partial/     beside what `data_prep/files/journal.py` keeps there
    tokenizer.json   the tokeniser, if it has a file
    journal.json     how far the files below are on the disk; what they have beyond is cut off
    tokens, index    as `.bin` and `.idx`, whose header comes last
    digests          of each text so far, where duplicates are left out
    boundaries       of the documents so far, where they have several sequences
    vocabulary.json  what will be `.vocabulary.json`, for data of sentences
    manifest.json    what will be `.json`, once the rest is complete
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from data_prep.errors import DataPrepError
from data_prep.files.journal import JOURNAL, work_folder, work_folder_of
from data_prep.files.progress import hashes
from data_prep.indexed.manifest import Manifest
from data_prep.text.encode import Encoded
from data_prep.text.formats import DIGEST
from data_prep.tokenizers.vocabulary import TOKENIZER
from megatron_ext.contract.files import read_regular, why, write_atomic
from megatron_ext.data.index_maps import saved_maps
from megatron_ext.data.indexed_dataset import HEADER, LENGTH, OFFSET, data_file, sync
from megatron_ext.data.masked.sentence_maps import saved_sentence_maps
from megatron_ext.data.masked.vocabulary import VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is: the next raw document, and what has been written for those before."""

    file: Count = 0
    number: Count = 0
    """In its file."""
    documents: Count = 0
    sequences: Count = 0
    tokens: Count = 0
    left_out: dict[str, int]

    def after(self, chunk: Encoded, sequences: int, tokens: int) -> Progress:
        """With one more chunk written, and so many sequences and tokens in all."""
        return Progress(
            file=chunk.file,
            number=chunk.number + 1,
            documents=self.documents + len(chunk.sequences),
            sequences=sequences,
            tokens=tokens,
            left_out=dict(Counter(self.left_out) + chunk.left_out),
        )


class Files(NamedTuple):
    """Open for reading and writing."""

    tokens: BinaryIO
    idx: BinaryIO
    digests: BinaryIO
    boundaries: BinaryIO


class Partial:
    """The folder of data in the making; `partial` opens it."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self.folder = work_folder_of(prefix)
        self.tokenizer = self.folder / "tokenizer.json"
        self.vocabulary = self.folder / "vocabulary.json"
        self._journal = self.folder / JOURNAL

    @property
    def begun(self) -> bool:
        """Whether data of some recipe are in the making, or were when a process was killed."""
        return self.folder.is_dir()

    @property
    def resumable(self) -> bool:
        return self._journal.exists()

    @contextmanager
    def open(self, token_bytes: int, digests: bool, sentences: bool) -> Iterator[tuple[Progress, Files]]:
        """How far the data are, and their files, at their ends; that of digests holds none if there are to be no
        `digests`, that of boundaries none if there are no `sentences`."""
        progress = self._progress() if self.resumable else Progress(left_out={})
        if not sentences:  # an older journal does not count them
            progress = replace(progress, sequences=progress.documents)
        sizes = {
            "tokens": progress.tokens * token_bytes,
            "index": HEADER.size + progress.sequences * LENGTH.itemsize,
            "digests": progress.documents * DIGEST if digests else 0,
            "boundaries": progress.documents * OFFSET.itemsize if sentences else 0,
        }
        for name, size in sizes.items():
            path = self.folder / name
            path.touch()
            if self.resumable and path.stat().st_size < size:
                raise DataPrepError(
                    f"{path}: expected at least {size} bytes, as {self._journal} says, but found {path.stat().st_size}"
                    f"; delete {self.folder} and run the same command again"
                )
        with ExitStack() as stack:
            files = Files(*(stack.enter_context((self.folder / name).open("r+b", 1 << 20)) for name in sizes))
            files.digests.truncate(sizes["digests"])
            files.boundaries.truncate(sizes["boundaries"])
            files.boundaries.seek(sizes["boundaries"])
            yield progress, files

    def _progress(self) -> Progress:
        way_out = f"delete {self.folder} and run the same command again"
        try:
            return typed(Progress, json.loads(read_regular(self._journal)), str(self._journal))
        except RunFolderError as error:
            raise DataPrepError(f"{error}; {way_out}") from error
        except (ValueError, RecursionError) as error:
            raise DataPrepError(f"{self._journal}: damaged ({why(error)}); {way_out}") from error

    def save(self, progress: Progress, files: Files) -> None:
        """Notes `progress`, once all that it tells of is on the disk."""
        for file in files:
            sync(file)
        write_atomic(self._journal, json.dumps(asdict(progress)))

    def give_up(self) -> None:
        """Nothing of it is gone on with: the same command would fail again."""
        self._journal.unlink(missing_ok=True)

    def publish(self, manifest: Manifest) -> Manifest:
        """Gives the files their names, the manifest last. Returns it with their hashes.

        All is on the disk before. An older manifest and index go away first, so that they never lie beside new tokens;
        so do the index maps of the older data, which would keep a run from beginning.
        """
        files = {
            ".bin": self.folder / "tokens",
            TOKENIZER: self.tokenizer,
            VOCABULARY: self.vocabulary,
            ".idx": self.folder / "index",
        }
        there = {suffix: path for suffix, path in files.items() if path.exists()}
        manifest = replace(manifest, sha256=hashes(there))
        there[".json"] = self.folder / "manifest.json"
        write_atomic(there[".json"], manifest.to_json())
        self._journal.unlink(missing_ok=True)
        for suffix in (".json", ".idx", TOKENIZER, VOCABULARY):
            data_file(self._prefix, suffix).unlink(missing_ok=True)
        for path in (*saved_maps(self._prefix), *saved_sentence_maps(self._prefix)):
            path.unlink(missing_ok=True)
        for suffix, path in there.items():
            path.replace(data_file(self._prefix, suffix))
        return manifest


@contextmanager
def partial(prefix: Path, recipe: dict[str, Any]) -> Iterator[Partial]:
    """The folder for data of this recipe, which may be begun already; raises as `work_folder` does."""
    with work_folder(prefix, recipe):
        yield Partial(prefix)
