"""From text to indexed data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conf.rundir import write_atomic
from data_prep.corpus import StdlibCorpus, read_documents
from data_prep.errors import DataPrepError
from data_prep.manifest import Manifest, hashes, read_manifest
from data_prep.tokenizer import Tokenizer
from megatron_ext.errors import DataError
from megatron_ext.indexed_dataset import data_file, indexed_writer, token_dtype


def text_prefix(output: Path) -> Path:
    """The prefix of the data that `--output` asks for, with the ending that Megatron's own tool gives.

    Raises:
        DataPrepError: `output` has no name that could take an ending.
    """
    if output.name in ("", ".."):
        raise DataPrepError(f"--output {output}: not a name for files; give a folder and a name, such as data/stdlib")
    return output.with_name(f"{output.name}_text_document")


def is_prepared(prefix: Path, source: str, tokenizer: Tokenizer) -> bool:
    """Whether the files are there, unchanged, and of this source and tokeniser."""
    try:
        manifest = read_manifest(prefix)
    except DataPrepError:  # Nobody can tell what the data are: that is for `prepare` to mend.
        return False
    if manifest is None or (manifest.source, manifest.tokenizer) != (source, tokenizer.name):
        return False
    return all(data_file(prefix, suffix).exists() for suffix in (".bin", ".idx")) and hashes(prefix) == manifest.sha256


def prepare(corpus: StdlibCorpus, tokenizer: Tokenizer, prefix: Path) -> Manifest:
    """Writes `<prefix>.bin`, `.idx` and `.json`; shows progress on stderr. Nothing half-written takes these names.

    Raises:
        DataPrepError: the text cannot be read or the files cannot be written.
    """
    from rich.console import Console
    from rich.progress import track

    files = corpus.files()
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document])
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with indexed_writer(prefix, dtype) as writer:
            shown = track(files, f"preparing {prefix.name}", console=Console(stderr=True))
            for text in read_documents(shown):
                writer.add(np.concatenate([tokenizer.encode(text), end]).astype(dtype))
            data_file(prefix, ".json").unlink(missing_ok=True)  # an old manifest never lies beside new data
        manifest = Manifest(
            source=corpus.description,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            documents=writer.documents,
            tokens=writer.tokens,
            sha256=hashes(prefix),
        )
        write_atomic(data_file(prefix, ".json"), manifest.to_json())
    except DataError as error:
        raise DataPrepError(str(error)) from error
    except OSError as error:
        raise DataPrepError(f"{error.filename or prefix}: cannot be written ({error.strerror})") from error
    return manifest
