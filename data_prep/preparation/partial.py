"""Indexed data in the making: a hidden folder beside them, from which an interrupted preparation goes on.

.<name>.partial/
    lock             held by the process that works here
    recipe.json      what the data follow from: the folder is of use for nothing else
    tokenizer.json   the tokeniser, if it has a file
    journal.json     how far the files below are on the disk; what they have beyond is cut off
    tokens, index    as `.bin` and `.idx`, whose header comes last
    digests          of each text so far, where duplicates are left out
    boundaries       of the documents so far, where they have several sequences
    vocabulary.json  what will be `.vocabulary.json`, for data of sentences
    manifest.json    what will be `.json`, once the rest is complete
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from conf.errors import RunFolderError
from conf.run_folder.json_values import Count, typed
from data_prep.errors import DataPrepError
from data_prep.indexed.manifest import TOKENIZER, Manifest, hashes
from data_prep.text.encode import Encoded
from data_prep.text.formats import DIGEST
from megatron_ext.contract.files import read_regular, why, write_atomic
from megatron_ext.data.index_maps import saved_maps
from megatron_ext.data.indexed_dataset import HEADER, LENGTH, OFFSET, data_file, sync
from megatron_ext.data.sentence_maps import saved_sentence_maps
from megatron_ext.data.vocabulary import VOCABULARY

LOCK = "lock"
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems say that are mounted without locks, as Lustre may be, or NFS whose servers run no daemon for them:
two processes cannot then see each other."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is: the next raw document, and what has been written for those before."""

    file: Count = 0
    number: Count = 0
    """In its file."""
    documents: Count = 0
    sequences: Count = 0
    tokens: Count = 0
    left_out: dict[str, int] = field(default_factory=dict)

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
        self.folder = prefix.with_name(f".{prefix.name}.partial")
        self.tokenizer = self.folder / "tokenizer.json"
        self.vocabulary = self.folder / "vocabulary.json"
        self._journal = self.folder / "journal.json"

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
        progress = self._progress() if self.resumable else Progress()
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
                    f"{path}: expected at least {size} bytes, as {self._journal} tells, found {path.stat().st_size}; "
                    f"delete {self.folder} and run the same command again"
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

    def _take_up(self, recipe: dict[str, Any]) -> None:
        """Empties the folder if it was begun by another recipe."""
        noted, text = self.folder / "recipe.json", json.dumps(recipe)
        if not _holds(noted, text):
            for path in self.folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
            write_atomic(noted, text)


def _holds(path: Path, text: str) -> bool:
    try:
        return read_regular(path) == text.encode()
    except OSError:
        return False


@contextmanager
def partial(prefix: Path, recipe: dict[str, Any]) -> Iterator[Partial]:
    """The folder for data of this recipe, which may be begun already.

    It goes away at the end, but for one from which an interrupted preparation can go on.

    Raises:
        DataPrepError: another process works in it. `OSError` where it cannot be made.
    """
    found = Partial(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    found.folder.mkdir(0o755, exist_ok=True)
    _require_own(found.folder)
    with (found.folder / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataPrepError(
                f"{prefix}: another process is preparing these data ({found.folder}); wait for it, or choose another "
                "--output"
            ) from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        found._take_up(recipe)
        try:
            yield found
        finally:
            if not found.resumable:
                shutil.rmtree(found.folder)


def _require_own(folder: Path) -> None:
    """Raises DataPrepError unless it is a folder that this user alone may write in.

    In a shared folder somebody else could have made it first: a link to a folder of ours, or a folder with links to
    files of ours, which would then be emptied.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        why = "is a link, or a file"
    elif found.st_uid != os.geteuid():
        why = "belongs to another user"
    elif found.st_mode & 0o022:
        why = f"can be written by others (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return
    raise DataPrepError(
        f"{folder} {why}: what lies in it may be a trap; look at it, delete it, and run the same command again"
    )
