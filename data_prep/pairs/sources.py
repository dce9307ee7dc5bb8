"""What the paths of `--source` hold: which readers give their pairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import DataPrepError
from data_prep.files.archives import files_below, is_archive, names
from data_prep.files.compressed import SUFFIXES
from data_prep.pairs.catalogues import Catalogues, is_catalogue
from data_prep.pairs.help_pages import HelpPages, is_page
from data_prep.pairs.lines import TabSeparated, TwoFiles, split_named, without_compression
from data_prep.pairs.pair import Languages, Reader

TABS = ".tsv"
FORMS = (
    "pairs come from two files of lines, de first for --source-lang de; from Moses' corpus for corpus.de and "
    "corpus.en; from .tsv, .mo and .po files, or folders of them; and from .deb packages, tar files and folders with "
    "catalogues (.mo, .po) or LibreOffice's help pages"
)
_ENDING = re.compile(r"[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?")


def languages_of(source: str | None, target: str | None, paths: Sequence[Path]) -> Languages:
    """The languages asked for, or those that the names of two files end in.

    Raises:
        DataPrepError: nothing says them, or they are the same.
    """
    if source is None and target is None and len(paths) == 2:
        endings = [without_compression(path.name).rpartition(".")[2] for path in paths]
        if all(_ENDING.fullmatch(ending) for ending in endings) and not set(endings) & {
            "txt",
            "tsv",
            "mo",
            "po",
            "deb",
        }:
            source, target = endings
    for name, language in (("--source-lang", source), ("--target-lang", target)):
        if language is None:
            raise DataPrepError(f"{name} is missing: the code of a language, such as {name} de")
        if not re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", language):
            raise DataPrepError(f"{name} {language}: not the code of a language, such as de, en or en-US")
    assert source is not None and target is not None
    if source == target:
        raise DataPrepError(f"--source-lang {source} and --target-lang {target} are the same language; name two")
    return Languages(source, target)


def readers_of(paths: Sequence[Path], languages: Languages) -> list[Reader]:
    """The readers of all pairs, in the order of the paths; help pages and catalogues come last.

    Raises:
        DataPrepError: a path is not there, or nobody can tell what it holds.
    """
    readers: list[Reader] = []
    plain: list[Path] = []
    pages: list[Path] = []
    catalogues: list[Path] = []
    for path in paths:
        if path.is_dir() or is_archive(path):
            held = names(path)
            in_folder = _in_folder(path, languages) if path.is_dir() else []
            readers += in_folder
            has_pages, has_catalogues = any(map(is_page, held)), any(map(is_catalogue, held))
            pages += [path] * has_pages
            catalogues += [path] * has_catalogues
            if not (in_folder or has_pages or has_catalogues):
                raise DataPrepError(f"--source {path}: it has no pairs; {FORMS}")
        elif not path.exists():
            readers.append(_moses(path, languages))
        elif not path.is_file():  # it is read twice, and a pipe or a device may never end
            raise DataPrepError(f"--source {path}: not a regular file; write its output to a file, and give that")
        elif is_catalogue(path.name):
            catalogues.append(path)
        elif without_compression(path.name).endswith(TABS):
            readers.append(TabSeparated(path, split_named(path)))
        else:
            plain.append(path)
    if len(plain) % 2:
        raise DataPrepError(
            f"--source {plain[-1]}: the file with its translation is missing: give both, {languages.source} first; "
            f"{FORMS}"
        )
    for two in zip(plain[::2], plain[1::2], strict=True):
        endings = [without_compression(path.name).rpartition(".")[2] for path in two]
        source, target = reversed(two) if endings == [languages.target, languages.source] else two
        readers.append(TwoFiles(source, target, split_named(source)))
    if pages:
        readers.append(HelpPages(tuple(pages), languages))
    if catalogues:
        readers.append(Catalogues(tuple(catalogues), languages))
    return readers


def _in_folder(folder: Path, languages: Languages) -> list[Reader]:
    """Returns readers of the folder's files of lines."""
    readers: list[Reader] = []
    for path in files_below(folder):
        name = without_compression(path.name)
        if name.endswith(TABS):
            readers.append(TabSeparated(path, split_named(path)))
        elif name.endswith(f".{languages.source}"):
            target = _existing(path.with_name(name.removesuffix(languages.source) + languages.target))
            if target is not None:
                readers.append(TwoFiles(path, target, split_named(path)))
    return readers


def _moses(path: Path, languages: Languages) -> TwoFiles:
    """`corpus` stands for `corpus.de` and `corpus.en`."""
    found = [_existing(path.with_name(f"{path.name}.{language}")) for language in languages]
    if found[0] is None and found[1] is None:
        raise DataPrepError(f"--source {path}: no such file or folder; {FORMS}")
    for side, language in zip(found, languages, strict=True):
        if side is None:
            raise DataPrepError(f"--source {path}: there is no {path}.{language}; {FORMS}")
    source, target = found
    assert source is not None and target is not None
    return TwoFiles(source, target, split_named(path))


def _existing(path: Path) -> Path | None:
    """The file, or the compressed one of this name."""
    names = [path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)]
    return next((name for name in names if name.is_file()), None)
